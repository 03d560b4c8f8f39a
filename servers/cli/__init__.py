"""The commands that run engines and fleets."""
