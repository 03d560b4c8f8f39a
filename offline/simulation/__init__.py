"""Runs in virtual time: the engines' timing law, the proxy's own routing, and simulated clients."""
