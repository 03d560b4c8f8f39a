"""How vLLM is launched for each role, and its build for machines without a GPU."""
