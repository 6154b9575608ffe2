"""States between the segments of a sequence, out of their summaries: config, layouts, roles, kernel."""
