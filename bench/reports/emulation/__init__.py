"""Rows of emulated clusters beside published and predicted ones."""
