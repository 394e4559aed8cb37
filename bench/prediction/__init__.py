"""Seconds on machines that are described: models, plans, calibration."""
