"""The cases to measure: the paper's rows, and the sizes that presets give them."""
