"""Bytes as people write and read them."""

from __future__ import annotations

import re

__all__ = ["SIZE_PATTERN", "size_bytes_of", "size_text"]

SIZE_PATTERN = r"|[0-9]+(\.[0-9]+)?\s*[KMGTkmgt]?i?[Bb]?"  # of a setting

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def size_text(size_bytes: float) -> str:
    """Bytes in a unit that a person reads: ``1.5 MiB``."""
    size = float(size_bytes)
    for unit in _UNITS[:3]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def size_bytes_of(text: str) -> int:
    """Bytes in ``6GiB``, ``500 MB``, ``1000000``; 0 for an empty text. ``KB`` is 1000 bytes, ``KiB`` is 1024.

    Raises:
        ValueError: the text is not a size.
    """
    if not text.strip():
        return 0
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(I?)B?\s*", text.upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 6GiB, 500MB or a number of bytes")
    number, letter, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[letter])
