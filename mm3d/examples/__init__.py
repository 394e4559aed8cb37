"""Programs of the tour, see README.rst, and of a training beside the library transformers."""
