"""A fleet on one machine: its processes, started and ended together."""
