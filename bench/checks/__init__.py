"""Checks of models, products and operations against the right results."""
