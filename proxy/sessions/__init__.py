"""Which conversation a request continues, and how much of it was seen before."""
