"""SVG and HTML as text: tags, escaped names, short numbers."""

from __future__ import annotations

import html
import re

# What XML 1.0 allows; a name with anything else would make the whole file unreadable.
_FORBIDDEN = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: str) -> str:
    """``text`` fit for XML and HTML, in ASCII: no encoding of the file can spoil it."""
    allowed = html.escape(_FORBIDDEN.sub("\ufffd", text))
    return allowed.encode("ascii", "xmlcharrefreplace").decode("ascii")


def element(tag: str, content: str = "", /, **attributes: str | float) -> str:
    """``<tag ...>content</tag>``. ``content`` is markup, attributes are plain text or numbers.

    A trailing underscore of an attribute's name is dropped (``class_``), others become dashes.
    """
    parts = [tag]
    for key, value in attributes.items():
        text = clean(value) if isinstance(value, str) else number(value)
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{text}"')
    start = " ".join(parts)
    return f"<{start}>{content}</{tag}>" if content else f"<{start}/>"


def number(value: float) -> str:
    """A coordinate, to a thousandth of a pixel, without needless zeros."""
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def count(value: int, noun: str = "") -> str:
    """``1,024 ranks``, ``1 rank``, or only the number."""
    text = f"{value:,}"
    return text if not noun else f"{text} {noun}" if value == 1 else f"{text} {noun}s"


def short_count(value: int) -> str:
    """About three digits: 950, 1.5k, 11.2M, 3,200M. No G or B, which would look like bytes."""
    for unit, factor in (("M", 1_000_000), ("k", 1_000)):
        if value >= factor:
            scaled = value / factor
            digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
            text = f"{scaled:,.{digits}f}"
            return (text.rstrip("0").rstrip(".") if digits else text) + unit
    return str(value)


def percent(ratio: float) -> str:
    """``7.31%``. What is not nothing or not all is not shown as 0% or 100%."""
    if ratio in (0, 1):
        return f"{ratio:.0%}"
    if ratio < 0.0001:
        return "< 0.01%"
    return "> 99.99%" if 0.9999 < ratio < 1 else f"{ratio:,.2%}"


def shorten(name: str, room: int) -> str:
    """``name`` in at most ``room`` characters: its end, from a dot if possible; "" if hopeless."""
    if len(name) <= room:
        return name
    short = name.removesuffix(".weight")
    while len(short) > room and "." in short:
        short = short.split(".", 1)[1]
    return short if len(short) <= room else ""
