"""`ppd replay`: the turns of a receipt log, decided again by other rules."""
