"""The benchmarks of a GPU, at small sizes on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.data.checkpoints import build_checkpoint

_TOWERS = ("1 x 96 x 96", "2 x 96 x 96", "1 x 128 x 64", "whisper, 1 window", "whisper, 2 windows")
_EMBEDDINGS = ("1080p, 66.8 MB", "448 px, 6.4 MB", "448 px, 0.4 MB")
#: What begins a row of each part, in order.
_ROWS = {
    "checks": [
        "python", "torch", "transformers", "triton", "CUDA, cuDNN",
        "tower, one picture", "tower, padded", "20 new shapes of a tower",
        "no triton is installed", "all",
    ],
    "engines": [
        *(f"decode, batch {n}, context 24, {how}" for how in ("greedy", "sampled") for n in (1, 4)),
        "prefill 32 tokens behind 0", "prefill 64 tokens behind 0", "prefill 32 tokens behind 64",
        "decode, batch 4, context 24, sdpa",
        "decode, batch 1, context 24, with graphs", "decode, batch 4, context 24, with graphs",
        *[f"decode, batch {n}, context 4, graphs {mode}" for mode in ("off", "static") for n in (1, 4)] * 2,
    ],
    "towers": [
        *(name for name in _TOWERS for _ in range(3)),
        *(f"bart, {n} x 32 tokens" for n in (1, 2) for _ in range(3)),
        "448 px", "1080p", *(name for name in _EMBEDDINGS for _ in range(3)),
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4]))


def first_cells(text: str) -> list[str]:
    """Those of a page's rows, without the heads of tables and the rows of a profile."""
    lines = text.splitlines()
    rows = [
        line
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("| ") and "---" not in line + after
    ]
    cells = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    return [cell for cell in cells if not cell.startswith(("aten::", "[memory]"))]


def test_a_checkpoint_is_measured_without_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.gpu import engine

    monkeypatch.setattr(engine, "BATCHES", (1, 2))
    monkeypatch.setattr(engine, "RESULT", tmp_path / "result.md")
    sizes = {"side": 64, "prompt": 16, "tokens": 4, "repeats": 1}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    path = str(build_checkpoint("qwen3_vl"))
    engine.main([path, "--device=cpu", "--dtype=float32", "--attention-backend=sdpa", "--write", *options])
    rows = first_cells((tmp_path / "result.md").read_text())
    assert [row.split()[0].strip(",") for row in rows] == ["encode", "encode", "prefill", "decode", "decode"]


def test_sequences_that_end_before_all_decode_are_an_error_with_its_remedy() -> None:
    from benchmarks.gpu import engine

    options = ["--device=cpu", "--dtype=float32", "--side=64", "--prompt=16", "--repeats=1"]
    with pytest.raises(SystemExit, match="batch 4: no step decodes all: give a larger --chunk"):
        engine.main(
            [str(build_checkpoint("qwen3_vl")), *options, "--tokens=2", "--chunk=16", "--batches", "4"]
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", _ROWS)
def test_a_rehearsal_of_make_gpu_measures_every_case(part: str, tmp_path: Path) -> None:
    from benchmarks.gpu.__main__ import main

    page = tmp_path / "gpu.md"
    assert main([part, "--rehearse", "--page", str(page)]) == 0, page.read_text()
    assert first_cells(page.read_text()) == _ROWS[part]
    assert ("kernel" in page.read_text()) == (part != "towers")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_vllm_what_is_deployed_is_said_to_be_missing_and_transfers_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu.__main__ import main

    monkeypatch.setenv("PATH", "")
    page = tmp_path / "gpu.md"
    assert main(["deployed", "--rehearse", "--page", str(page)]) == 0, page.read_text()
    assert first_cells(page.read_text()) == ["66.8 MB"] * 3 + ["1 MB"] * 3
    assert "vLLM is not installed here" in page.read_text()


def test_random_weights_on_disk_are_those_of_every_tensor(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from benchmarks.gpu.random_models import fill_weights, write_model

    folder = fill_weights(write_model("qwen3_vl", tmp_path / "model", small=True), torch.device("cpu"))
    weights = load_file(folder / "model.safetensors")
    assert [name for name, weight in weights.items() if weight.dim() > 1 and not weight.any()] == []
    assert all(weight.isfinite().all() for weight in weights.values())


def test_a_part_without_time_leaves_what_it_has_and_the_other_parts_sections(tmp_path: Path) -> None:
    from benchmarks.gpu.__main__ import main

    page = tmp_path / "gpu.md"
    page.write_text("# On a GPU\n\n## 2. engines\n\nrows of engines\n\n## 3. towers\n\n| old |\n")
    assert main(["towers", "--rehearse", "--minutes", "0.001", "--page", str(page)]) == 1
    text = page.read_text()
    assert "## 2. engines\n\nrows of engines\n\n## 3. towers\n" in text
    assert "**Cut off after 0.001 minutes**" in text and "old" not in text


def test_a_case_that_fails_is_on_the_page_and_the_next_one_runs(tmp_path: Path) -> None:
    from benchmarks.gpu.part_page import PartPage, section

    file = tmp_path / "part.md"
    page = PartPage(file)
    page.table("what", "time")
    for name in ("first", "second"):
        with page.case(name):
            page.row(name, "1 ms")
            if name == "first":
                raise RuntimeError("no memory | at all")
    assert page.failures == 1
    assert section(file.read_text(), "Cut off").splitlines() == [
        "| what | time |",
        "|---|---|",
        "| first | 1 ms |",
        "",
        "**first failed** after 0 s: RuntimeError: no memory \\| at all",
        "| second | 1 ms |",
        "",
        "**Cut off** in: second",
    ]


def test_without_torch_the_remedy_is_named_before_anything_is_installed() -> None:
    root = Path(__file__).parents[4]
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv[1], {}, '__main__')"
    found = subprocess.run(
        [sys.executable, "-c", code, str(root / "benchmarks/gpu/find_torch.py")],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1
    assert "has no torch: pip install torch==2.13.0" in found.stderr
    rule = (root / "Makefile").read_text().partition(".venv-gpu/.installed:")[2].splitlines()
    assert rule[1].strip() == "$(PYTHON) benchmarks/gpu/find_torch.py", "it is the first line"


def test_the_program_says_what_torch_lacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from benchmarks.gpu.__main__ import main

    if torch.cuda.is_available():
        pytest.skip("this torch lacks nothing")
    page = tmp_path / "gpu.md"
    assert main(["checks", "--page", str(page)]) == 2
    assert not page.exists()
    assert "make gpu: torch" in capsys.readouterr().err
