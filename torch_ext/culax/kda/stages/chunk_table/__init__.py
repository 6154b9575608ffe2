"""The chunk table of packed or equal sequences: config, layouts, roles, kernel."""
