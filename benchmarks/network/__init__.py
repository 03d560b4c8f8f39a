"""Bad networks between a proxy and its workers: what is tried, how it is made, and what came of it."""
