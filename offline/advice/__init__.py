"""`ppd advise`: the fleet and the mode that serve the traffic of a receipt log best, by simulation."""
