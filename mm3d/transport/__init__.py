"""How bytes travel between the ranks of one direction of a grid."""
