"""The ways of measuring a run: in virtual time, on a fleet that is there, on fleets that are started for it."""
