"""How much does a prefill slow the sequences that decode beside it?"""
