"""What each worker holds of a prompt, and on which evidence."""
