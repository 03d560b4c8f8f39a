"""Engines by role: vLLM, the simulated engine, the agent that heartbeats for one, and the fleet on one machine."""
