"""Stands before one engine and runs the legs that an endpoint picker has chosen: P's, then its own."""
