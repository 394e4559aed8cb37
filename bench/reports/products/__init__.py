"""Tables of distributed products side by side."""
