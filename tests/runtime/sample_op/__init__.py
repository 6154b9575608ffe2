"""A trivial op in the shape of culax's: a plan, one stage package, one device helper."""
