"""Starts, prepares and stops the processes of a fleet on one machine."""
