"""Gradients of the states after the chunks and dvn (B1, B2): config, layouts, roles, kernel."""
