"""Draw blocks that travel in a product, or a pipeline schedule; print their words or costs."""

GROUP = "Plan and predict"
