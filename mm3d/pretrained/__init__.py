"""Read and write models in the format of Hugging Face, each rank its own blocks."""
