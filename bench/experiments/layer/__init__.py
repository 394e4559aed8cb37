"""One Transformer layer, beside the same layer by PyTorch."""
