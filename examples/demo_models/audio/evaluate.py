"""Evaluates the audio demo on held-out recordings.

    python -m examples.demo_models.audio.evaluate [--url URL] [--n N]

A recording counts as right when all its digits are written and nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.demo_models.audio.inference import MODEL_ID, Http, InProcess, Listener, Timed
from examples.demo_models.audio.recordings import Recording, random_recording, sound
from triptych.apps.launch.model_path import AUDIO_DEMO_MODEL

LENGTHS = range(3, 9)
#: dB of the tones over the noise; None: no noise. Training goes down to 5.
NOISES = (None, 30.0, 20.0, 10.0, 5.0)
HARDER = 0.0


@dataclass(frozen=True)
class Mark:
    recording: Recording
    plain: str
    timed: Timed

    @property
    def right(self) -> bool:
        return self.plain == self.recording.digits

    @property
    def right_timed(self) -> bool:
        return self.timed.text == self.recording.digits

    @property
    def start_error(self) -> float | None:
        """Seconds; None where no segment was written."""
        return None if self.timed.start is None else abs(self.timed.start - self.recording.tones[0].start)

    @property
    def end_error(self) -> float | None:
        return None if self.timed.end is None else abs(self.timed.end - self.recording.tones[-1].end)


def cases(seed: int, n: int, noises: Sequence[float | None] = NOISES) -> list[Recording]:
    """`n` recordings of held-out strings: every length with every noise in turn."""
    random = np.random.default_rng((seed, 7))
    grid = [(length, noise) for noise in noises for length in LENGTHS]
    return [
        random_recording(random, length, kept_out=True, snr=noise)
        for length, noise in (grid[index % len(grid)] for index in range(n))
    ]


def evaluate(listener: Listener, recordings: Sequence[Recording]) -> list[Mark]:
    """Writes every recording without times and with them."""
    sounds = [sound(recording) for recording in recordings]
    plain, timed = listener.plain(sounds), listener.timed(sounds)
    return [Mark(*row) for row in zip(recordings, plain, timed, strict=True)]


def _part(marks: Sequence[bool]) -> str:
    return f"{100 * sum(marks) / len(marks):.1f} %" if marks else "-"


def _errors(errors: Sequence[float | None]) -> str:
    """Median, and the largest; a recording without a segment counts as the largest."""
    known = sorted(float("inf") if error is None else error for error in errors)
    return f"{known[len(known) // 2]:.2f} / {known[-1]:.2f}" if known else "-"


def _row(name: str, marks: Sequence[Mark]) -> str:
    starts = [mark.start_error for mark in marks]
    cells = (
        name,
        str(len(marks)),
        _part([mark.right for mark in marks]),
        _part([mark.right_timed for mark in marks]),
        _errors(starts),
        _part([error is not None and error <= 0.2 for error in starts]),
        _errors([mark.end_error for mark in marks]),
    )
    return "| " + " | ".join(cells) + " |"


def _noise(snr: float | None) -> str:
    return "no noise" if snr is None else f"{snr:.0f} dB"


def report(marks: Sequence[Mark]) -> str:
    """A Markdown table by length, by noise, and of all."""
    lines = [
        "| recordings | n | right | right, with times | start error, s | start within 0.2 s | end error, s |",
        "|---|---|---|---|---|---|---|",
    ]

    def rows(named: Callable[[Mark], str]) -> None:
        for name in dict.fromkeys(named(mark) for mark in marks):
            lines.append(_row(name, [mark for mark in marks if named(mark) == name]))

    rows(lambda mark: f"{len(mark.recording.digits)} digits")
    rows(lambda mark: _noise(mark.recording.snr))
    lines.append(_row("**all**", marks))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="an OpenAI-compatible server; default: in this process")
    parser.add_argument("--model", default=MODEL_ID, help="the model's name at the server")
    parser.add_argument("--folder", type=Path, default=AUDIO_DEMO_MODEL, help="checkpoint folder")
    parser.add_argument("--n", type=int, default=600, help="recordings, over all lengths and noises")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--harder", action="store_true", help="at 0 dB, noisier than training, instead")
    parser.add_argument("--wrong", type=int, default=0, help="print so many wrong recordings")
    arguments = parser.parse_args(argv)
    listener: Listener = (
        Http(arguments.url, arguments.model) if arguments.url else InProcess(arguments.folder)
    )
    noises = (HARDER,) if arguments.harder else NOISES
    marks = evaluate(listener, cases(arguments.seed, arguments.n, noises))
    print(report(marks))
    wrong = [mark for mark in marks if not (mark.right and mark.right_timed)]
    for mark in wrong[: arguments.wrong]:
        print(f"{mark.recording.digits} {_noise(mark.recording.snr)}: {mark.plain}, with times {mark.timed}")


if __name__ == "__main__":
    main()
