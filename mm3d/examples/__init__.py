"""Three programs of the tour; see README.rst."""
