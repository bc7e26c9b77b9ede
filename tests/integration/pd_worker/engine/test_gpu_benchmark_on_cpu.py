from __future__ import annotations

from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint


def test_the_gpu_benchmark_runs_at_small_size_without_a_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4]))
    from benchmarks.gpu import engine

    monkeypatch.setattr(engine, "BATCHES", (1, 2))
    monkeypatch.setattr(engine, "RESULT", tmp_path / "result.md")
    sizes = {"side": 64, "prompt": 16, "tokens": 4, "repeats": 1}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    path = str(build_checkpoint("qwen3_vl"))
    engine.main(
        [path, "--device=cpu", "--dtype=float32", "--attention-backend=blockwise", "--write", *options]
    )
    rows = [line for line in (tmp_path / "result.md").read_text().splitlines() if line.startswith("| ")]
    assert [row.split()[1].strip(",") for row in rows] == [
        "what",
        "encode",
        "encode",
        "prefill",
        "decode",
        "decode",
    ]
