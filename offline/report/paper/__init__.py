"""The rows published with the paper, beside what the paper prints."""
