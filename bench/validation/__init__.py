"""Files held against the schema and the rules of a run."""
