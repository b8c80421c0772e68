"""Minimise: the smallest case, or sequence of calls, that still shows a finding, and a script that shows it."""
