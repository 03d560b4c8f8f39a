"""Fits an engine profile to measured runs, by simulating those runs."""
