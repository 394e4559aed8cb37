"""Matrix products and collectives alone."""
