"""Generated parts of the README stand between two comment lines."""

from __future__ import annotations


def inserted(text: str, markers: tuple[str, str], content: str) -> str:
    """`text` with `content` between its two markers.

    Raises:
        ValueError: the text lacks a marker.
    """
    first, last = markers
    head, begin, rest = text.partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"expected {first} and {last} in the text")
    return f"{head}{first}\n{content}\n{last}{tail}"
