"""Samples from which a machine model was fitted."""

SCHEMAS = {
    "calibration": {
        "verified": True,
        "positive": "operation_seconds step_seconds",
        "settings": "rounds transport",
        "variables": {
            "operation_seconds": "operation repetition",
            "step_seconds": "work repetition"}}}
