from __future__ import annotations

from pathlib import Path

import pytest

from triptych.base.errors import ConfigError
from triptych.base.machine.resources import MAX_KIND_CHARS, worker_kind


def machine(folder: Path, cpuinfo: str) -> Path:
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text(cpuinfo)
    return folder


def test_the_kind_of_a_cpu_worker_names_its_model_and_threads(tmp_path: Path) -> None:
    root = machine(tmp_path, "processor\t: 0\nmodel name\t: AMD EPYC  9B14\nflags\t: fpu\n")
    assert worker_kind("", "cpu", 2, root=root) == "cpu AMD EPYC 9B14 x2 threads"
    shared = worker_kind("", "cpu", 4, ranks=2, root=root)
    assert shared == "cpu AMD EPYC 9B14 x4 threads x2 ranks", "as fast as others with as many ranks only"


def test_the_flag_overrides_the_device() -> None:
    assert worker_kind("B60 in rack 4", "cuda:0", 1) == "B60 in rack 4"


@pytest.mark.parametrize("given", ["x" * (MAX_KIND_CHARS + 1), "two\nlines"])
def test_a_kind_that_is_too_long_or_not_printable_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--worker-kind"):
        worker_kind(given, "cpu", 1)
