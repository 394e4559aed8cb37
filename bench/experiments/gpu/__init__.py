"""The parts of one GPU alone."""
