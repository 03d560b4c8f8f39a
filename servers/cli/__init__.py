"""The commands that run engines and fleets: `agent`, `sidecar`, `up`, `demo`."""
