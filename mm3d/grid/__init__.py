"""Arrange ranks in a grid of named directions, and divide arrays over it."""
