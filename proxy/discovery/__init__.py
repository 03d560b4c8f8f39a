"""How workers are announced: heartbeats, engines' own pings, and the config."""
