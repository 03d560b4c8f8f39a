"""Which workers to leave alone for now, and who finds out when they are well again."""
