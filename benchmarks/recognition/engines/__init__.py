"""Engines in virtual time: their prefix caches, their queues, and the KV events that they publish."""
