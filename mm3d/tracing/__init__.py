"""The events of a step: observed, counted, or run dry without arrays."""
