"""Per-chunk operands of the scans (F3): config, layouts, roles, kernel."""
