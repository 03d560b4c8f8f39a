"""Reads each endpoint's prompt into a chain of hashes: what its members are, and which of them count."""
