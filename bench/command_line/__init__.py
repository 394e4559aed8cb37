"""What verbs share: options, grids asked for by name, and files written and reported."""
