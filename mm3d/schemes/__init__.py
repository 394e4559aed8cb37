"""The parallelisms, one file each; `mm3d.scheme` finds them by name."""
