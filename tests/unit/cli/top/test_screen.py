"""The screen: all that an operator looks for, at any width, whatever workers name themselves."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from support.fakes.live_view import EXAMPLE
from triptych.apps.cli.top.screen import Trends, screen
from triptych.proxy.live.objects import ClusterSnapshot

SEEN = msgspec.convert(EXAMPLE["snapshot"], ClusterSnapshot)


def drawn(seen: ClusterSnapshot, width: int, height: int = 0, problem: str = "") -> list[str]:
    trends = Trends()
    for _ in range(100):
        trends.add(seen)
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(screen(seen, trends, width, height, problem))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 100, 160, 300])
def test_everything_of_a_snapshot_is_on_the_screen(width: int) -> None:
    text = "\n".join(drawn(SEEN, width))
    for word in (
        *(
            "triptych-images",
            "9/256",
            "4 queued",
            "205 MiB",
            "11.3/s",
            "212/s",
            "37%",
            "93%",
            "310ms",
            "1.90s",
        ),
        *("179 MiB of 512 MiB", "12 evictions", "1 live, 2 desired (flow)", "encoder-0", "lost"),
        *(
            "31%",
            "97%",
            "704 MiB",
            "71%",
            "16.0 GiB",
            "shm 7",
            "9c01be77",
            "decode",
            "1/2",
            "encoder worker encoder-1 is lost",
            "3 times",
        ),
    ):
        assert word in text, word


@pytest.mark.parametrize("width", [40, 80, 160, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, drawn(SEEN, width))) <= width


@pytest.mark.parametrize(("width", "height"), [(80, 40), (80, 60), (160, 30), (160, 60)])
def test_a_large_cluster_fits_the_terminals_height(width: int, height: int) -> None:
    many = msgspec.structs.replace(
        SEEN,
        encoders=SEEN.encoders * 50,
        pd_workers=SEEN.pd_workers * 50,
        requests=SEEN.requests * 20,
        failures=SEEN.failures * 10,
    )
    lines = drawn(many, width, height)
    assert len(lines) <= height
    text = "\n".join(lines)
    assert "Encoder workers: 100" in text and "PD workers: 100" in text and "Requests in flight" in text


def test_a_problem_stands_first() -> None:
    assert drawn(SEEN, 80, problem="no server answers at x")[0].startswith("no server answers")


def test_names_are_shown_as_they_are_and_cannot_steer_the_terminal() -> None:
    strange = msgspec.structs.replace(SEEN.encoders[0], name="[red]\x1b]0;x\x07", state="[/]")
    seen = msgspec.structs.replace(SEEN, encoders=[strange], models=["[bold]m\x1b[2J"])
    text = "\n".join(drawn(seen, 160))
    assert "\x1b" not in text and "\x07" not in text
    assert "[red]?]0;x?" in text and "[bold]m?[2J" in text
