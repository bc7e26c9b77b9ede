"""Pages of 2 MiB."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from triptych.base.machine import pages
from triptych.base.machine.pages import HUGE_PAGE, use_huge_pages, why_no_huge_pages
from triptych.pd_worker.attention.metadata import PagedKVCache


def mapping_of(address: int) -> dict[str, str]:
    """What the system says of the mapping that has this address."""
    inside, found = False, {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= address < end
        elif inside:
            found[name] = value.strip()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="no smaps")
def test_written_memory_keeps_its_content_and_is_in_huge_pages_where_the_system_has_them() -> None:
    asked, found = [], []
    # More than once: a system that is short of memory splits a huge page as soon as it gave it.
    for _ in range(5):
        memory = torch.arange(2 * HUGE_PAGE, dtype=torch.int64)
        asked.append(use_huge_pages(memory.data_ptr(), memory.nbytes))
        size, _ = mapping_of(memory.data_ptr())["AnonHugePages:"].split()
        found.append(int(size) << 10 >= memory.nbytes // 2)
        assert torch.equal(memory, torch.arange(2 * HUGE_PAGE))
    assert any(found) or not any(asked)
    assert not use_huge_pages(memory.data_ptr(), 0)


@pytest.mark.skipif(why_no_huge_pages() != "", reason="the system gives none")
def test_keys_and_values_are_asked_for_in_huge_pages() -> None:
    sizes = {"num_layers": 1, "num_blocks": 64, "block_size": 16, "num_kv_heads": 2, "head_dim": 64}
    cache = PagedKVCache(**sizes, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert "hg" in mapping_of(cache.keys[0].data_ptr())["VmFlags:"].split()
    assert not cache.keys[0].any()


def test_memory_that_is_not_ours_is_a_refusal_and_no_error() -> None:
    assert not use_huge_pages(1 << 46, 5)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("always [madvise] never\n", ""),
        ("[always] madvise never\n", ""),
        ("always madvise [never]\n", "says never"),
        (None, "there is no"),
    ],
)
def test_a_system_without_huge_pages_is_told_apart(content, why, tmp_path, monkeypatch):
    monkeypatch.setattr(pages.sys, "platform", "linux")
    setting = tmp_path / "enabled"
    if content is not None:
        setting.write_text(content)
    found = why_no_huge_pages(setting)
    assert found == "" if why == "" else why in found
    monkeypatch.setattr(pages.sys, "platform", "darwin")
    assert "Linux" in why_no_huge_pages(setting)
