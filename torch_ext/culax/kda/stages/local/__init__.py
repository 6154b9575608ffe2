"""All gradients within a chunk (B1, B3, B4, B6): config, layouts, roles, columns, kernel."""
