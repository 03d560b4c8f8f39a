"""The simulated engine: it behaves towards a proxy as a vLLM server does, without a model or a GPU."""
