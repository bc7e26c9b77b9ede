"""The cuts that the partitions benchmark makes, and the rows of its page."""

from __future__ import annotations

import math

from benchmarks.partitions.cuts import ALONE, PAIRS, all_cuts
from benchmarks.partitions.page import Measured, quantile, table


class Hosts:
    """Notes the directions that are cut."""

    def __init__(self) -> None:
        self.cuts: list[tuple[str, str, bool]] = []

    def cut(self, sender: str, receiver: str, *, both: bool = True) -> None:
        self.cuts.append((sender, receiver, both))

    def isolate(self, host: str) -> None:
        self.cuts.append((host, "all", True))


def test_every_pair_is_cut_both_ways_and_each_way_and_every_kind_of_host_alone() -> None:
    hosts = Hosts()
    for cut in all_cuts():
        cut.make(hosts)
    pairs = [
        (*ends, both) for pair in PAIRS for ends, both in ((pair, True), (pair, False), (pair[::-1], False))
    ]
    assert hosts.cuts == [*pairs, *((host, "all", True) for host in ALONE)]
    assert [cut.silent for cut in all_cuts() if cut.silent] == [("proxy-0",)]


def test_a_quantile_is_the_least_value_that_its_share_does_not_exceed() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (quantile(values, 0.99), quantile(values, 0.5), quantile([7.0], 0.01)) == (99.0, 50.0, 7.0)
    assert math.isnan(quantile([], 0.99))


def test_a_row_shows_what_was_asked_how_long_it_took_and_what_got_no_answer() -> None:
    measured = Measured("a – b", {"text": [0.1], "fresh": [0.5, 2.0]}, {503: 3}, wrong=1)
    assert table([measured])[-1] == "| a – b | 6 | 0.10 | nan | 2.00 | 3 x 503 | 1 |"
