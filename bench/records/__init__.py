"""Records: one run is one HDF5 file, written whole or not at all."""
