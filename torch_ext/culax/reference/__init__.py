"""Plain torch implementations of every op, on any device and in any floating dtype."""
