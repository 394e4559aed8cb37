"""Carry out collectives between the ranks of one direction of a grid."""
