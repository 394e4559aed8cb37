"""The rows of the paper's tables."""
