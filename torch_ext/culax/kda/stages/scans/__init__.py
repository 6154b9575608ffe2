"""The walks over the chunks, forward (F4) and from the last one (B1, B2): config, layouts, forward, reverse, kernel."""
