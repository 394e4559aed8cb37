"""Route the tokens of mixture-of-experts layers, in the same way on every mesh."""
