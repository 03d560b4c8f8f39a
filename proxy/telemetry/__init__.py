"""What the proxy tells of itself: receipts of turns, and metrics."""
