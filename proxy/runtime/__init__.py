"""The process: its tasks, limits, files, ids and TLS contexts."""
