"""HTTP to workers: pooled connections, calls, and their answers."""
