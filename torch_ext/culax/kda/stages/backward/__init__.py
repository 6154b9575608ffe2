"""A whole backward call from one host function: config, layouts, kernel."""
