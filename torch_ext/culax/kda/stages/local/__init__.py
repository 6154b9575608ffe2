"""All gradients within a chunk (B1, B3, B4, B6): config, layouts, memory, products, roles, columns, kernel."""
