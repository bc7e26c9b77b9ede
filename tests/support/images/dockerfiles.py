"""A parser of Dockerfiles: their stages and instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "deploy" / "docker"
NAMES = ("proxy", "worker-cpu", "worker-cuda")


@dataclass
class Stage:
    """The instructions from one FROM to the next, as (word, rest)."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        """What follows `word`, for each instruction of that name."""
        return [rest for name, rest in self.instructions if name == word]

    def only(self, word: str) -> str:
        """What follows the one instruction named `word`."""
        (rest,) = self.all(word)
        return rest

    def variables(self) -> dict[str, str]:
        """The environment that the image gives its containers."""
        return dict(pair.split("=", 1) for rest in self.all("ENV") for pair in rest.split())


@dataclass
class Dockerfile:
    """One Dockerfile: the ARGs before the first FROM, then its stages."""

    name: str
    text: str
    arguments: dict[str, str]
    stages: list[Stage]

    @property
    def final(self) -> Stage:
        """The stage that becomes the image."""
        return self.stages[-1]


def read(name: str) -> Dockerfile:
    """The Dockerfile of the image `name`."""
    text = (FOLDER / f"{name}.Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in joined.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append(Stage(rest))
        elif stages:
            stages[-1].instructions.append((word, rest.strip()))
        else:
            key, _, value = rest.partition("=")
            arguments[key] = value
    return Dockerfile(name, text, arguments, stages)
