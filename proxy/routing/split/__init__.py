"""The two legs of a SPLIT: run in the order of their connector, or by D's sidecar, and freed of what a client left."""
