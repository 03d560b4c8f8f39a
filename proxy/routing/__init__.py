"""One turn, from its request to its answer: which session, which workers, which legs, and what it taught."""
