"""Offline measurement of the local-or-split trade-off: the sweep, the virtual-time simulator, the table builder."""
