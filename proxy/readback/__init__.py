"""Handles of KV that a D keeps for a P to read back: which tokens one stands for, how long it is good, and whose it is.

A handle is used once. vLLM compares no tokens, so a P's answer that was computed with one counts only where P's own
tokens of the prompt begin with those of the handle.
"""
