"""Encoded media: what an encoder (E) is asked and answers, and where the other engines get embeddings from."""
