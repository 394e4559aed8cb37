"""Say what Hugging Face's files call the models, sizes and tensors of this library."""
