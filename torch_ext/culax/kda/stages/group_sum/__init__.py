"""dq and dk of grouped heads from their value heads (B5): config, layouts, roles, kernel."""
