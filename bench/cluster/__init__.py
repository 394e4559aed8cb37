"""An emulated cluster: network namespaces of this machine, joined by links of limited rate."""
