"""Attention: its layer, the rings and windows that it may have, and what a context costs."""
