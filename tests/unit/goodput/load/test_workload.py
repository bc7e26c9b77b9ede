"""Workloads, presets, pictures and texts: decided by their seed."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image

from triptych.base.errors import ConfigError
from triptych.goodput.load.payload import WORDS, jpeg, text, words_per_token
from triptych.goodput.load.workload import (
    Picture,
    Workload,
    check_workload,
    parse_images,
    parse_sizes,
    plan_requests,
)
from triptych.goodput.measure.slo import PRESETS, preset


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_valid_and_the_same_from_one_seed(name):
    load = preset(name).workload
    check_workload(load)
    assert plan_requests(load, 40, 3) == plan_requests(load, 40, 3)
    assert plan_requests(load, 40, 3)[:20] == plan_requests(load, 20, 3)
    assert plan_requests(load, 40, 3) != plan_requests(load, 40, 4)


@pytest.mark.parametrize(("name", "tokens"), [("short", 400), ("long", 2000)])
def test_the_published_matrix_is_there_with_a_twin_of_a_quarter(name, tokens):
    for images in (1, 2, 3, 4):
        big, small = preset(f"{name}-{images}"), preset(f"small-{name}-{images}")
        assert big.workload == Workload(tokens, 150, ((images, 1.0),), ((640, 640, 1.0),))
        assert (big.rates[0], big.rates[-1]) == (4, 24)
        assert str(big.slo) == "ttft:20000 tpot:100"
        assert small.workload.text_tokens * 4 == tokens
        assert small.workload.images == big.workload.images
        assert small.workload.sizes == ((320, 320, 1.0),)


def test_an_unknown_preset_is_answered_with_those_there_are():
    with pytest.raises(ConfigError, match="reuse-90"):
        preset("nothing")


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


def test_windows_of_different_seeds_share_no_picture_and_no_text():
    load = replace(preset("images-4").workload, reuse=0.5)
    first, second = plan_requests(load, 200, 1), plan_requests(load, 200, 2)
    assert not {p for one in first for p in one.pictures} & {p for one in second for p in one.pictures}
    assert not {one.seed for one in first} & {one.seed for one in second}


def test_lengths_spread_around_their_mean():
    load = Workload(text_tokens=100, output_tokens=50, text_spread=0.5, output_spread=0.2)
    planned = plan_requests(load, 2000, 1)
    lengths = [one.text_tokens for one in planned]
    assert (min(lengths), max(lengths)) == (50, 150)
    assert sum(lengths) / len(lengths) == pytest.approx(100, rel=0.03)
    assert {one.output_tokens for one in planned} <= set(range(40, 61))


@pytest.mark.parametrize("content", ["noise", "waves"])
def test_a_picture_is_a_jpeg_of_its_size_and_equal_from_equal_numbers(content):
    picture = Picture(7, 48, 32, content)
    data = jpeg(picture)
    assert data == jpeg(picture) != jpeg(replace(picture, seed=8))
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.size) == ("JPEG", (48, 32))


def test_texts_have_as_many_words_as_tokens_are_wanted_and_differ_at_once():
    assert len(text(40, 1).split()) == 40
    assert text(40, 1) == text(40, 1)
    assert len({text(40, seed).split()[0] for seed in range(50)}) > 20
    assert len(text(40, 1, 0.5).split()) == 20
    assert len(WORDS) > 150


def test_words_per_token_leaves_out_what_a_chat_template_adds():
    assert words_per_token((10, 10 * 2 + 14), (110, 110 * 2 + 14)) == 0.5
    assert words_per_token((10, 20), (110, 20)) == 1.0


def test_weights_are_read_as_people_write_them():
    assert parse_images("2") == ((2, 1.0),)
    assert parse_images("0:0.8,1:0.2") == ((0, 0.8), (1, 0.2))
    assert parse_sizes("640x480:0.7,32x32:0.3") == ((640, 480, 0.7), (32, 32, 0.3))


@pytest.mark.parametrize("parse", [parse_images, parse_sizes])
@pytest.mark.parametrize("word", ["", "a", "1:b", "3,"])
def test_what_are_no_weights_is_refused_by_flag(parse, word):
    with pytest.raises(ConfigError, match="--image"):
        parse(word)


@pytest.mark.parametrize(
    "changes",
    [
        {"reuse": 1.0},
        {"reuse": -0.1},
        {"text_tokens": 0},
        {"output_tokens": 0},
        {"images": ((-1, 1.0),)},
        {"images": ((1, 0.0),)},
        {"sizes": ((0, 4, 1.0),)},
        {"text_spread": 2.0},
    ],
)
def test_a_workload_that_cannot_be_is_refused_by_flag(changes):
    with pytest.raises(ConfigError, match="--"):
        check_workload(replace(Workload(), **changes))
