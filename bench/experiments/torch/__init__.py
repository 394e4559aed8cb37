"""Compute by PyTorch what mm3d computes, in processes with an interpreter of their own."""
