"""The process: its background tasks and drain, its limits, the files it watches, and TLS contexts."""
