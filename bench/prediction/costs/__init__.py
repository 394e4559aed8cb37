"""What schemes cost, counted by dry runs, beside the costs that are in print."""
