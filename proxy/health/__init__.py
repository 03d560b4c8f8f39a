"""Which workers turns must avoid for now, and how the proxy finds out that they are well again."""
