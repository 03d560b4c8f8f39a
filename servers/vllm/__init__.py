"""Command lines of vLLM for each role, and vLLM with a tiny model for machines without a GPU."""
