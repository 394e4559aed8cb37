"""Compute the printed numbers of papers again from those printed beside them; a file a paper."""
