"""The cases to measure: the paper's rows at the sizes of a preset."""
