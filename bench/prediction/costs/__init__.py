"""Count what schemes cost by dry runs, beside the costs in print."""
