"""Several processes on one port that behave as one proxy: what each learns, the others know before they need it."""
