"""A whole optimizer step as one op: plans, update rules, gradient norms, parameters partitioned among ranks, ZeRO-1."""
