"""The sizes that a pool may have, as they are written."""

from __future__ import annotations

import pytest

from support.options import assert_refused, parse, triptych
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.base.config import ClusterConfig, ServeConfig, WorkerCounts, WorkerRange
from triptych.base.config.flags import arguments
from triptych.base.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "encoders", "pd_workers"),
    [
        (("--encoders", "3"), WorkerRange.fixed(3), WorkerRange.fixed(1)),
        (("--encoders", "0..4", "--pd-workers", "1..3"), WorkerRange(0, 4), WorkerRange(1, 3)),
        (("--encoders", "2..2", "--pd-workers", " 1 .. 64 "), WorkerRange.fixed(2), WorkerRange(1, 64)),
    ],
)
def test_a_number_is_fixed_and_a_range_is_scaled(words, encoders, pd_workers):
    for command, kind in (("serve", ServeConfig), ("check", ClusterConfig)):
        config = parse(kind, command, *words)
        assert (config.encoders, config.pd_workers) == (encoders, pd_workers)
        assert config.pools == {"encoder": encoders, "pd": pd_workers}
        assert parse(kind, command, *arguments(config)) == config


def test_the_most_workers_are_planned_for() -> None:
    config = parse(ServeConfig, "serve", "--encoders", "0..4", "--pd-workers", "1..3")
    assert config.counts == WorkerCounts(encoders=4, pd_workers=3)


@pytest.mark.parametrize(
    ("command", "flag", "text", "told"),
    [
        ("serve", "--encoders", "4..2", "--encoders 4..2: the least is above the most; write 2..4"),
        ("serve", "--pd-workers", "2..0", "--pd-workers 2..0: the least is above the most; write 1..2"),
        ("serve", "--encoders", "0..65", "--encoders 0..65: at most 64 workers"),
        ("serve", "--pd-workers", "65", "--pd-workers 65: at most 64 workers"),
        ("serve", "--pd-workers", "0..3", "--pd-workers 0..3: the least is at least 1; write 1..3"),
        ("serve", "--pd-workers", "0", "--pd-workers 0: at least 1"),
        ("serve", "--encoders", "0..0", "--encoders 0..0: the most is at least 1, like 0..1"),
        ("check", "--encoders", "0", "--encoders 0: at least 1; --encoders 0..1 starts one"),
        ("serve", "--encoders", "..4", "like 2, or a range, like 0..4"),
        ("serve", "--encoders", "1...4", "like 2, or a range, like 0..4"),
        ("serve", "--pd-workers", "1-3", "like 2, or a range, like 1..4"),
        ("serve", "--encoders", "-1..4", "like 2, or a range, like 0..4"),
        ("serve", "--encoders", "²..4", "like 2, or a range, like 0..4"),
        ("serve", "--encoders", "1" * 5000, "like 2, or a range, like 0..4"),
    ],
)
def test_what_is_no_range_is_refused_with_the_flag_and_the_remedy(command, flag, text, told):
    with pytest.raises(ConfigError) as refused:
        parse(ServeConfig, command, flag, text)
    assert told in str(refused.value)


@pytest.mark.parametrize("command", ["serve", "check"])
def test_replicas_are_not_scaled(command: str) -> None:
    result = triptych(command, str(DEMO_MODEL), "--topology", "colocated", "--encoders", "0..4")
    assert_refused(result, "--encoders 0..4 is for --topology epd", "--replicas 4")


def test_a_number_outside_of_a_range_is_brought_into_it() -> None:
    assert [WorkerRange(1, 3).clamp(wanted) for wanted in (-1, 0, 2, 9)] == [1, 1, 2, 3]
