"""Show layers of experts that were measured."""
