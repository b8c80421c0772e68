"""Edits: pure functions from a case to a smaller or differently stored case that asks for the same numbers."""
