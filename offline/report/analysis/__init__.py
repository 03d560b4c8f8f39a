"""What the runs of a sweep say, as values."""
