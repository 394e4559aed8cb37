"""Ranks, directions and layouts: which rank holds which block."""
