"""Three programs to read first; see README.rst."""
