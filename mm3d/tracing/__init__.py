"""Observe the events of a step, count them, or run a step dry, without arrays."""
