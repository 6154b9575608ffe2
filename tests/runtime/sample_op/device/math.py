"""Arithmetic on one element."""


def scaled(value, factor):
    """Return value * factor."""
    return value * factor
