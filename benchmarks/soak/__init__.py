"""Conversations through a proxy whose workers fail, leave and come back: the load, the faults, the right texts, the
verdict."""
