"""Recorded conversations and traces: files of any known format, read into conversations of turns."""
