"""Train a GPT on text, compare meshes, and train the same model by PyTorch."""
