"""Clients' connections: the port, HTTP/1.1 and HTTP/2, their limits, and how an answer's bytes go out."""
