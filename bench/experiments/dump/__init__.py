"""Judge a dump of any program's training step by what mm3d computes from the same weights."""
