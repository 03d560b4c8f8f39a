"""The workers: what they are, and what state they are in."""
