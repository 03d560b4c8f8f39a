"""The process: its tasks and drain, limits, log, watched files and TLS, guards of ZeroMQ, and how state is shared."""
