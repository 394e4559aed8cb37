"""The Transformer, written once for every scheme, and its costs in closed form."""
