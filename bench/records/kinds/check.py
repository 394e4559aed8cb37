"""Predictions beside measurements."""

SCHEMAS = {
    "check": {
        "verified": True,
        "positive": "samples",
        "settings": "dtype transport",
        "variables": {"samples": "work phase repetition"},
        "labels": {"phase": [["forward", "backward"]]}}}
