"""The parts of one GPU, and everything that a machine with GPUs is asked."""
