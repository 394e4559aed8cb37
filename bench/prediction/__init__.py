"""Predict seconds by machine models: plans, calibration, fits to the paper."""
