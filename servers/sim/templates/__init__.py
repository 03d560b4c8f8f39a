"""Chat templates: a conversation's prompt in tokens, in the order in which real models' templates write it."""
