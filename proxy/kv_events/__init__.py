"""What engines say about their own caches: KV events read, checked and indexed."""
