"""Records of runs, one HDF5 file each, written whole or not at all."""
