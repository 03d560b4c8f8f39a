"""The commands that run engines and fleets: `agent`, `up`, `demo`."""
