"""The ways to measure a run: in virtual time, on a running fleet, or on fleets started for it."""
