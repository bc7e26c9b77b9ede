"""Arrivals and workloads, decided by their seed; traces."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import Tokenizer

from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.base.errors import ConfigError
from triptych_bench.goodput import launch
from triptych_bench.goodput.load import pictures
from triptych_bench.goodput.load.azure_lmm import IMAGES, TEXT_TOKENS, lmm_workload, read_azure_csv
from triptych_bench.goodput.load.job import Target
from triptych_bench.goodput.load.pictures import CONTENTS, PHOTOGRAPHS, draw
from triptych_bench.goodput.load.words import text
from triptych_bench.goodput.load.workload import (
    KINDS,
    Arrivals,
    Picture,
    PlannedRequest,
    Workload,
    arrival_times,
    check_workload,
    parse_images,
    parse_sizes,
    plan_requests,
    read_trace,
)
from triptych_bench.goodput.measure.slo import PRESETS, preset


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_valid_and_the_same_from_one_seed(name):
    load = preset(name).workload
    check_workload(load)
    assert plan_requests(load, 40, 3) == plan_requests(load, 40, 3)
    assert plan_requests(load, 40, 3)[:20] == plan_requests(load, 20, 3)
    assert plan_requests(load, 40, 3) != plan_requests(load, 40, 4)


@pytest.mark.parametrize("reuse", [0.0, 0.5, 0.9])
def test_the_share_of_repeated_pictures_is_the_reuse_ratio(reuse):
    load = Workload(images=((1, 1.0),), reuse=reuse)
    shown = [picture for planned in plan_requests(load, 2000, 1) for picture in planned.pictures]
    assert 1 - len(set(shown)) / len(shown) == pytest.approx(reuse, abs=0.03)


def test_the_mix_of_text_and_pictures_and_their_sizes_follows_the_weights():
    load = Workload(images=((0, 0.8), (1, 0.2)), sizes=((320, 320, 3.0), (640, 480, 1.0)))
    planned = plan_requests(load, 4000, 1)
    pictures = [picture for one in planned for picture in one.pictures]
    assert len(pictures) / len(planned) == pytest.approx(0.2, abs=0.03)
    assert sum(p.width == 640 for p in pictures) / len(pictures) == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize("parse", [parse_images, parse_sizes])
@pytest.mark.parametrize("word", ["", "a", "1:b", "3,"])
def test_what_are_no_weights_is_refused_by_flag(parse, word):
    with pytest.raises(ConfigError, match="--image"):
        parse(word)


HEAD = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"


def test_a_plan_has_the_shares_of_the_trace() -> None:
    planned = plan_requests(lmm_workload(), 4000, 7)
    counts = [len(request.pictures) for request in planned]
    for count, share in IMAGES:
        assert counts.count(count) / len(counts) == pytest.approx(share, abs=0.025)
    tokens = sorted(request.text_tokens for request in planned)
    for share, below in TEXT_TOKENS[3:-2]:
        assert tokens[round(share * len(tokens))] == pytest.approx(below, rel=0.15)


def test_requests_of_more_pictures_than_the_limit_have_the_limit() -> None:
    shares = dict(lmm_workload(25).images)
    assert max(shares) == 25
    assert sum(shares.values()) == pytest.approx(1.0)


def test_the_published_file_is_read_with_the_tokens_of_pictures_taken_off(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        HEAD + "2024-10-15T12:00:00.250Z,0,770,491\n"
        "2024-10-15T12:00:02.250Z,1,949,126\n2024-10-15T12:00:04.250Z,16,900,0\n"
    )
    (first, text), (second, single), (third, grid) = read_azure_csv(path, speed=2.0)
    assert (first, second, third) == (0.0, 1.0, 2.0)
    assert (text.text_tokens, text.output_tokens, text.pictures) == (770, 491, ())
    assert (single.text_tokens, [picture.width for picture in single.pictures]) == (949 - 576, [768])
    assert (grid.text_tokens, grid.output_tokens, len(set(grid.pictures))) == (1, 1, 16)


@pytest.mark.parametrize(
    "line", ["yesterday,0,1,1\n", "2024-10-15T12:00:00Z,one,1,1\n", "2024-10-15T12:00:00Z,1\n"]
)
def test_a_line_that_is_none_of_the_trace_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + line)
    with pytest.raises(ConfigError, match=r"trace\.csv line 2: .*its columns are TIMESTAMP"):
        read_azure_csv(path)


def test_a_file_that_is_not_there_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_azure_csv(tmp_path / "trace.csv")
    (tmp_path / "trace.csv").write_text(HEAD)
    with pytest.raises(ConfigError, match="holds no request"):
        read_azure_csv(tmp_path / "trace.csv")


@pytest.fixture
def photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `skimage` whose photographs are one gradient each."""
    package = tmp_path / "skimage"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in PHOTOGRAPHS:
        Image.linear_gradient("L").resize((90, 60)).convert("RGB").save(package / "data" / name)
    monkeypatch.syspath_prepend(str(tmp_path))
    pictures._source.cache_clear()
    yield
    pictures._source.cache_clear()


@pytest.mark.usefixtures("photographs")
@pytest.mark.parametrize("content", CONTENTS)
def test_equal_values_draw_equal_pictures_and_other_seeds_others(content: str) -> None:
    first, again, other = (draw(Picture(seed, 64, 48, content)) for seed in (3, 3, 4))
    assert first.size == (64, 48)
    assert first.mode == "RGB"
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_most_of_two_screenshots_of_one_screen_is_the_same() -> None:
    def screen(seed: int) -> bytes:
        return draw(Picture(seed, 320, 200, "screenshots")).tobytes()

    first = screen(0)
    shares = [
        sum(a == b for a, b in zip(first, screen(seed), strict=True)) / len(first) for seed in range(1, 40)
    ]
    assert max(shares) > 0.9


def test_photographs_that_are_not_installed_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda _: None)
    pictures._source.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'triptych-bench\[photos\]'"):
        draw(Picture(0, 32, 32, "photos"))


@pytest.mark.parametrize("kind", KINDS)
def test_times_ascend_offer_the_rate_exactly_and_come_from_the_seed(kind):
    arrivals = Arrivals(kind, rate=8.0, burstiness=0.5, ramp_to=16.0)
    times = arrival_times(arrivals, 240, 1)
    assert times == sorted(times) == arrival_times(arrivals, 240, 1)
    assert times[-1] == pytest.approx(240 / (12.0 if kind == "ramp" else 8.0))
    assert kind == "constant" or times != arrival_times(arrivals, 240, 2)


def test_a_written_trace_replays_lengths_pictures_and_times(tmp_path):
    path = tmp_path / "load.jsonl"
    planned = plan_requests(preset("reuse-50").workload, 50, 1)
    lines = [
        {
            "time": time,
            "text_tokens": one.text_tokens,
            "output_tokens": one.output_tokens,
            "images": [{"id": str(p.seed), "width": p.width, "height": p.height} for p in one.pictures],
        }
        for time, one in zip(arrival_times(Arrivals(), 50, 1), planned, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    replayed = read_trace(path)
    assert [time for time, _ in replayed] == pytest.approx(arrival_times(Arrivals(), 50, 1))
    assert [one.output_tokens for _, one in replayed] == [one.output_tokens for one in planned]
    before = [planned.index(next(p for p in planned if p.pictures == one.pictures)) for one in planned]
    again = [one for _, one in replayed]
    after = [again.index(next(p for p in again if p.pictures == one.pictures)) for one in again]
    assert before == after
    assert [time for time, _ in read_trace(path, speed=2.0)] == pytest.approx(
        [time / 2 for time, _ in replayed]
    )


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"time": 1}',
        '{"time": -1, "text_tokens": 1, "output_tokens": 1}',
        '{"time": 0, "text_tokens": 1, "output_tokens": 1, "images": [{"id": "a", "width": 0, "height": 1}]}',
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path, line):
    path = tmp_path / "load.jsonl"
    path.write_text('{"time": 0, "text_tokens": 1, "output_tokens": 1}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(path)


def test_texts_have_about_as_many_tokens_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))

    def tokens(words: str) -> int:
        return len(tokenizer.encode(words).ids)

    async def counted(target: Target, planned: list[PlannedRequest]) -> list[int]:
        return [9 + tokens(text(one.text_tokens, one.seed)) for one in planned]

    monkeypatch.setattr(launch, "_prompt_tokens", counted)
    words_per_token = launch.calibrate(Target("http://127.0.0.1:1", "demo"))
    found = [tokens(text(512, seed, words_per_token)) for seed in range(20)]
    assert statistics.mean(found) == pytest.approx(512, rel=0.03)
