"""Evaluates the image demo on held-out scenes.

    python -m examples.demo_models.images.evaluate [--url URL] [--n N]

An answer counts as right when it is the whole true answer. Two controls show that the picture
matters: grey pictures, and other pictures for which the true answer differs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from examples.demo_models.images.answers import KINDS, answer
from examples.demo_models.images.inference import MODEL_ID, Answerer, Http, InProcess, Request, png
from examples.demo_models.images.samples import Sample, other_pictures, sample_of_kind, swappable
from examples.demo_models.images.scenes import Picture, draw
from triptych.apps.launch.model_path import DEMO_MODEL


@dataclass(frozen=True)
class Case:
    """A question with its pictures, and other pictures with another true answer."""

    kind: str
    sample: Sample
    swapped: tuple[Picture, ...]

    @property
    def question(self) -> str:
        return self.sample.turns[0].question

    @property
    def truth(self) -> str:
        return self.sample.turns[0].answer

    @property
    def swapped_truth(self) -> str | None:
        return answer(self.sample.turns[0].query, [picture.scene for picture in self.swapped])


@dataclass(frozen=True)
class Mark:
    case: Case
    said: str
    said_grey: str
    said_swapped: str


def cases(seed: int, n: int, split: str = "held_out") -> list[Case]:
    """`n` cases, the same number of each kind (a few less than `n` where it does not divide)."""
    rng = random.Random(f"evaluate:{seed}")
    out = []
    for kind in KINDS:
        for _ in range(max(1, n // len(KINDS))):
            sample = sample_of_kind(rng, split, kind)
            swapped = other_pictures(rng, sample, split) if swappable(sample) else ()
            out.append(Case(kind, sample, swapped))
    return out


def request(pictures: Iterable[Picture], question: str) -> Request:
    return Request(tuple(png(draw(picture)) for picture in pictures), question)


def grey_request(case: Case) -> Request:
    pictures = (Image.new("RGB", p.size, (128, 128, 128)) for p in case.sample.pictures)
    return Request(tuple(png(picture) for picture in pictures), case.question)


def evaluate(answerer: Answerer, asked: Sequence[Case], controls: bool = True) -> list[Mark]:
    """Asks every case, and with `controls` each again with grey and with swapped pictures."""
    said = answerer.answer([request(case.sample.pictures, case.question) for case in asked])
    grey, swapped = [""] * len(asked), [""] * len(asked)
    if controls:
        grey = answerer.answer([grey_request(case) for case in asked])
        some = [k for k, case in enumerate(asked) if case.swapped]
        replies = answerer.answer([request(asked[k].swapped, asked[k].question) for k in some])
        for k, reply in zip(some, replies, strict=True):
            swapped[k] = reply
    return [Mark(*row) for row in zip(asked, said, grey, swapped, strict=True)]


def _part(marks: Sequence[bool]) -> str:
    return f"{100 * sum(marks) / len(marks):.1f} %" if marks else "-"


def _row(name: str, marks: Sequence[Mark]) -> str:
    swapped = [m for m in marks if m.case.swapped]
    cells = (
        name,
        str(len(marks)),
        _part([m.said == m.case.truth for m in marks]),
        _part([m.said_grey == m.case.truth for m in swapped]),
        _part([m.said_swapped != m.said for m in swapped]),
        _part([m.said_swapped == m.case.swapped_truth for m in swapped]),
    )
    return "| " + " | ".join(cells) + " |"


def report(marks: Sequence[Mark]) -> str:
    """A Markdown table per kind of question, and the mean over all answers."""
    lines = [
        "| question | n | right | right, grey | changed, swapped | right, swapped |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        lines.append(_row(kind, [m for m in marks if m.case.kind == kind]))
    lines.append(_row("**all**", marks))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="an OpenAI-compatible server; default: in this process")
    parser.add_argument("--model", default=MODEL_ID, help="the model's name at the server")
    parser.add_argument("--folder", type=Path, default=DEMO_MODEL, help="checkpoint folder")
    parser.add_argument("--n", type=int, default=900, help="questions, over all kinds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--split", choices=("held_out", "train"), default="held_out")
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--wrong", type=int, default=0, help="print so many wrong answers")
    arguments = parser.parse_args(argv)
    answerer: Answerer = (
        Http(arguments.url, arguments.model) if arguments.url else InProcess(arguments.folder)
    )
    asked = cases(arguments.seed, arguments.n, arguments.split)
    marks = evaluate(answerer, asked, not arguments.no_controls)
    print(report(marks))
    wrong = [m for m in marks if m.said != m.case.truth]
    for mark in wrong[: arguments.wrong]:
        print(f"{mark.case.kind}: {mark.case.question}\n  {mark.case.truth}\n  {mark.said}")


if __name__ == "__main__":
    main()
