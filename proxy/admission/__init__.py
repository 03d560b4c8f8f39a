"""Who may come in, how much each may use, and who is next."""
