"""The process: its background tasks and drain, its limits, the files it watches, its log, and TLS contexts."""
