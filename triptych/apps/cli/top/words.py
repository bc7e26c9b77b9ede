"""Numbers and names as the terminal view writes them: short, and safe to print."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.base.config import GIB, MIB

_BARS = "▁▂▃▄▅▆▇█"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_KIB = 1 << 10


def plain(text: str) -> str:
    """The text on one line without control characters: a worker may register any name."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def size(nbytes: float) -> str:
    """Bytes with three digits or so."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (_KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """A time in its two largest units."""
    whole = int(seconds)
    if whole >= _DAY:
        return f"{whole // _DAY}d{whole % _DAY // _HOUR:02}h"
    if whole >= _HOUR:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02}m"
    if whole >= _MINUTE:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02}s"
    return f"{seconds:.1f}s"


def latency(seconds: float | None) -> str:
    """Milliseconds below a second; a dash for nothing."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else f"{seconds:.2f}s"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f}%"


def number(value: float | None) -> str:
    """A whole number, or one digit after the point where it is small; a dash for nothing."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def bar(share: float | None, width: int) -> str:
    """A share between 0 and 1 as a bar with its number."""
    if share is None:
        return "-"
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled) + f" {percent(share)}"


def sparkline(values: Iterable[float]) -> str:
    """Values over time, each as a column by the largest of them."""
    found = list(values)
    most = max(found, default=0.0)
    if most <= 0:
        return _BARS[0] * len(found)
    return "".join(_BARS[min(int(value / most * len(_BARS)), len(_BARS) - 1)] for value in found)
