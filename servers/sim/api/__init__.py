"""The simulated engine's HTTP: vLLM's endpoints, and faults on request."""
