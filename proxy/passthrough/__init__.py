"""Requests that are no turns: what a worker answers them, which models there are, and which responses are stored."""
