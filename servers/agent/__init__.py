"""Announces one engine to the proxy, and drains it."""
