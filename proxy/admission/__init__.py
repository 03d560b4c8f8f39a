"""API keys, rate limits and the queue: which turns may enter the fleet, and in which order."""
