"""Compute the same by PyTorch, in processes and an interpreter of its own."""
