"""Tables of plans, rules of thumb and published steps."""
