"""Ask the search of trainings about some meshes: rules of thumb, and a map of kinds of grids."""
