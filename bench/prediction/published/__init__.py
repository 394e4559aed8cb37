"""Predict what others measured: the tables of the paper, and steps of training."""
