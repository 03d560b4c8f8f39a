"""API keys and tenants, rate limits and the queue: which turns may enter the fleet, in which order, and as whose."""
