"""What the proxy records about its turns: metrics and receipts."""
