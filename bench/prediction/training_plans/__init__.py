"""Search whole trainings of a GPT for the fastest: how GPUs divide it, and what they recompute."""
