"""Steps in words: amounts, times, one line, one bar. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from triptych.progress.step import BYTES, StepState

_BAR_WIDTH = 24
#: Of a label, in a terminal of fewer and of at least so many columns.
_NARROW, _WIDE, _WIDE_COLUMNS = 32, 44, 100


@dataclass(frozen=True, slots=True)
class TerminalStyle:
    """What a terminal can show: `unicode` characters, `colour`."""

    unicode: bool = True
    colour: bool = True


def duration(seconds: float) -> str:
    """Seconds for people: "12 s", "3 min 20 s", "2 h 5 min"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    minutes = whole // 60
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def remaining(left: float | None) -> str:
    """What is left, "" for what is not known."""
    return "" if left is None else f"about {duration(max(1.0, left))} left"


def amount(state: StepState) -> str:
    """What is done of the total, in its unit; "" where there is nothing to count."""
    if state.unit == BYTES:
        done = _size(state.done)
        return done if state.total is None else f"{done} of {_size(state.total)}"
    unit = f" {state.unit}" if state.unit else ""
    if state.total is None:
        return f"{state.done:g}{unit}" if state.done else ""
    return f"{state.done:.6g} of {state.total:.6g}{unit}"


def line(state: StepState, seconds: float, left: float | None) -> str:
    """One line for a log: what, how far, how long it has taken or will."""
    share = state.share
    parts = [] if share is None else [f"{int(share * 100)} %"]
    parts += [amount(state), state.note]
    if state.ended:
        parts.append(f"{'given up after' if state.failed else 'in'} {duration(seconds)}")
    elif share is not None:
        parts.append(remaining(left) if share < 1 else "")
    elif seconds >= 1:
        parts.append(f"for {duration(seconds)}")
    shown = ", ".join(part for part in parts if part)
    return f"{state.label}: {shown}" if shown else state.label


def label_width(labels: Iterable[str], columns: int) -> int:
    """Of the first column of bars with these labels, in a terminal of so many columns."""
    return min(max(map(len, labels), default=0), _WIDE if columns >= _WIDE_COLUMNS else _NARROW)


def bar(
    state: StepState, seconds: float, left: float | None, columns: int, style: TerminalStyle, width: int = 0
) -> str:
    """One line for a terminal of so many columns, at most; its label has `width` of them, 0: what it needs.

    Where there is no room for all, the note goes first, then the bar.
    """
    share, width = state.share, width or label_width([state.label], columns)
    name = state.label if len(state.label) <= width else state.label[: width - 1] + "…"
    if share is None:
        drawn, parts = "", [amount(state), "" if state.ended else duration(seconds)]
    else:
        drawn = _drawn(share, style)
        parts = [f"{int(share * 100):3d} %", amount(state), "" if state.ended else remaining(left)]
    text = "  ".join(part for part in parts if part)
    head = f"{name:<{width}}  "
    if drawn and len(head) + _BAR_WIDTH + 2 + len(text) > columns:
        drawn = ""
    room = max(0, columns - len(head) - (_BAR_WIDTH + 2 if drawn else 0))
    text = _plain(f"{text}  {state.note}" if state.note else text, style)[:room].rstrip()
    return _plain(head, style)[:columns] + (f"{drawn}  " if drawn else "") + text


def _drawn(share: float, style: TerminalStyle) -> str:
    filled = int(share * _BAR_WIDTH)
    full, empty = ("━", "╌") if style.unicode else ("#", "-")
    done, rest = full * filled, empty * (_BAR_WIDTH - filled)
    return f"\x1b[36m{done}\x1b[0m{rest}" if style.colour else done + rest


def _plain(text: str, style: TerminalStyle) -> str:
    """One line without control characters, in ASCII where the terminal has no more."""
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown if style.unicode else shown.encode("ascii", "replace").decode()


def _size(nbytes: float) -> str:
    """As `triptych.config.format_size`, which shared code of the lowest layer does not import."""
    value = nbytes
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
