"""Goodput: the highest rate of sessions at which first turns and later turns, each by itself, meet the SLO."""
