"""Train a model in parallel: a GPT, pipelines and their schedules, optimizers, ZeRO."""
