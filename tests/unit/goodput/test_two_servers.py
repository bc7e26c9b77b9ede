"""Two servers that `triptych bench ab` measures in turns."""

from __future__ import annotations

import pytest

from triptych_bench.goodput.load.job import Target
from triptych_bench.goodput.run import beside_each_other


@pytest.mark.parametrize(
    ("other", "beside"),
    [
        ("http://127.0.0.1:8001", True),
        ("http://127.0.0.1:8000", False),
        ("http://10.0.0.7:8000", False),
        ("http://10.0.0.7:8001", False),
    ],
)
def test_two_servers_of_one_machine_get_a_warning(other: str, beside: bool) -> None:
    warning = beside_each_other(Target("http://127.0.0.1:8000", "m"), Target(other, "m"))
    assert ("--keep-core" in warning) is beside
