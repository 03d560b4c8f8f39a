"""The measurements of LOCAL against SPLIT, and what they say about one turn."""
