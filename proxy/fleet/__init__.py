"""The workers: what they are, what state they are in, and what they hold."""
