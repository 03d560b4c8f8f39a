"""What the proxy records about its turns: metrics, receipts and the access log."""
