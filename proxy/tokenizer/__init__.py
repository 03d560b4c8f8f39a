"""Prompts as engines read them: chat templates rendered, and texts in tokens, in a process beside the proxy."""
