from __future__ import annotations

import torch

from benchmarks.gpu.device_limits import page, table


def test_a_page_names_the_command_the_device_and_the_versions_before_its_tables() -> None:
    text = page("Speed", "python -m x", "cpu", "medians", [*table("what", "time"), "| step | 1 ms |"])
    title, _, how, _, *body = text.splitlines()
    assert title == "# Speed"
    assert how.startswith("`python -m x`, ") and how.endswith("; medians.")
    assert f"torch {torch.__version__}, CUDA {torch.version.cuda}, transformers " in how
    assert body == ["| what | time |", "|---|---|", "| step | 1 ms |"]
    assert text.endswith("\n")
