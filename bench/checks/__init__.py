"""Checks: a model, a product or an operation against the right result."""
