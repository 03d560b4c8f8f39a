"""The simulated engine as asyncio tasks: its steps in real time, side channel and KV events."""
