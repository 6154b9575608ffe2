"""y = factor * x + shift."""
