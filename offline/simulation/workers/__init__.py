"""The simulated workers: engines, their KV memory, the links between them, and what they do for a turn."""
