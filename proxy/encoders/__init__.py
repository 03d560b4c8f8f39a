"""Encoders (E): which of a turn's media they encode before its other legs, on which E, and what those legs carry."""
