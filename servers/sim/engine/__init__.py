"""The simulated engine in real time: the step loop as an asyncio task, its side channel, KV events and metrics."""
