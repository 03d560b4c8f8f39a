"""What work costs on one engine: the file that says it, and the time of a step that follows."""
