"""States before the chunks and v_new (F4): config, layouts, roles, kernel."""
