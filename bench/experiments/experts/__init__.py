"""Measure layers of experts: their parts, the words that they move, and PyTorch beside."""
