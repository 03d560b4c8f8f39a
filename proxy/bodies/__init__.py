"""Request bodies: their memory while they come, and a second process that reads the large ones."""
