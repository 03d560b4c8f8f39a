"""The other processes of this proxy: what one learns, the others know before they need it."""
