"""Workloads, presets, pictures and texts: decided by their seed."""

from __future__ import annotations

import pytest

from triptych.base.errors import ConfigError
from triptych.goodput.load.workload import Workload, check_workload, parse_images, parse_sizes, plan_requests
from triptych.goodput.measure.slo import PRESETS, preset


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
