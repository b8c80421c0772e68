"""Mutants: healthy kernels with one fault each, for the instrument's own tests."""
