"""Engines by role: vLLM, the simulated engine, the agent that announces one, and a fleet on one machine."""
