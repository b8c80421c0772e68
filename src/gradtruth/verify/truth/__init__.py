"""The truth: the fp64 oracle, and how far a healthy result may be from it."""
