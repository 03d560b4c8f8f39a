"""What does one part cost, or how well does one rule work: one program a file."""
