"""Check files against the schema and the rules of a run."""
