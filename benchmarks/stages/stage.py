"""One stage's time beside the least that the machine could take for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """`seconds` as measured; `least` by what is limited: "reading", "copying" or "matrix product"."""

    name: str
    seconds: float
    least: float | None = None
    limited_by: str = ""

    @property
    def share(self) -> float | None:
        """Of the limit that is reached: 1 is all that the machine can do."""
        return None if self.least is None else self.least / self.seconds

    def row(self) -> list[str]:
        least = "–" if self.least is None else f"{self.least * 1e3:.3g}"
        share = "–" if self.share is None else f"{self.share:.0%}"
        return [self.name, f"{self.seconds * 1e3:.3g}", least, share, self.limited_by or "–"]
