"""The proxy's other processes: what one process learns reaches the others before they need it."""
