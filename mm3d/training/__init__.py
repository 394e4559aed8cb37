"""Train a model in parallel: pipeline schedules as data."""
