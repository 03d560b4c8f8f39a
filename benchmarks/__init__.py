"""Programs that measure and compare; each writes records, then a report."""
