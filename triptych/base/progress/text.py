"""Steps in words: amounts, times, one line. Pure."""

from __future__ import annotations

from triptych.base.progress.step import BYTES, StepState


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


def printable(text: str) -> str:
    """`text` without control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _size(nbytes: float) -> str:
    """As `triptych.base.config.format_size`, which shared code of the lowest layer does not import."""
    value = nbytes
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
