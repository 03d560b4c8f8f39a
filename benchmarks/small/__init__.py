"""Programs of one file: what one part costs, or how well one rule does."""
