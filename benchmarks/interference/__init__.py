"""How much does a prefill slow the sequences that decode beside it, and how long do short prompts wait for it?"""
