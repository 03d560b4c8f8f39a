"""Where an answer's bytes pass: connections to workers and to clients, on asyncio protocols without a stream layer."""
