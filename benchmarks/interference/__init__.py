"""What a prefill costs the sequences that decode beside it: trials against a real endpoint, their records, figures."""
