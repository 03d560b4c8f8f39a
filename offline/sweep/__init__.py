"""Which runs of a grid come next, where each is done, and where it is kept."""
