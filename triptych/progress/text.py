"""Steps in words: amounts, times, one line, one bar. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.progress.step import BYTES, StepState

_BAR_WIDTH = 24
_LABEL_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Style:
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
    return "" if left is None else f"about {duration(left)} left"


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
        parts.append(remaining(left))
    elif seconds >= 1:
        parts.append(f"for {duration(seconds)}")
    shown = ", ".join(part for part in parts if part)
    return f"{state.label}: {shown}" if shown else state.label


def bar(state: StepState, seconds: float, left: float | None, columns: int, style: Style) -> str:
    """One line for a terminal of so many columns, at most."""
    share = state.share
    name = state.label if len(state.label) <= _LABEL_WIDTH else state.label[: _LABEL_WIDTH - 1] + "…"
    head = f"{name:<{_LABEL_WIDTH}} "
    tail = [amount(state), state.note]
    if share is None:
        drawn, width = "", 0
        tail.append(duration(seconds))
    else:
        filled = int(share * _BAR_WIDTH)
        full, empty = ("━", "╌") if style.unicode else ("#", "-")
        drawn, width = full * filled + empty * (_BAR_WIDTH - filled), _BAR_WIDTH + 1
        if style.colour:
            drawn = f"\x1b[36m{full * filled}\x1b[0m{empty * (_BAR_WIDTH - filled)}"
        tail = [f"{int(share * 100):3d} %", *tail, remaining(left)]
    text = "  ".join(part for part in tail if part)
    if len(head) + width + len(text) > columns:
        # The bar is what can be left out.
        drawn, width = "", 0
    text = _plain(text, style)[: max(0, columns - len(head) - width)]
    return _plain(head, style)[:columns] + (f"{drawn} " if drawn else "") + text


def _plain(text: str, style: Style) -> str:
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
