"""How the proxy learns of workers: heartbeats, engines' own pings, and the config."""
