"""The instrument: the fp64 oracle, measured error budgets, and what is built on them."""
