"""Fits an engine profile to measured runs, by simulating those runs; compares its law with measured engine steps."""
