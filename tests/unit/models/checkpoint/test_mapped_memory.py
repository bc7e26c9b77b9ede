"""What of a checkpoint's files counts as this process's memory while it is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from triptych.models.checkpoint import folder
from triptych.models.checkpoint.folder import Checkpoint, Cut

_MIB = 1 << 20
_TENSORS = 16


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """16 tensors of 1 MiB each, in one file."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    tensors = {f"w{i:02}": torch.full((_MIB // 4,), float(i)) for i in range(_TENSORS)}
    save_file(tensors, tmp_path / "model.safetensors")
    return Checkpoint(tmp_path)


def resident(file: Path) -> int:
    """Bytes of `file` that are mapped and resident in this process (smaps)."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split(" ")[0]:
            inside = line.endswith(str(file))
        elif inside and name == "Rss":
            total += int(rest.split()[0]) << 10
    return total


def test_files_are_mapped_anew_so_that_read_pages_do_not_stay(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "MAPPED_BYTES", 2 * _MIB)
    file = checkpoint.path / "model.safetensors"
    most = 0
    for key, tensor in checkpoint.read(checkpoint.files):
        assert float(tensor.sum()) == int(key[1:]) * tensor.numel()
        most = max(most, resident(file))
    # Up to two MiB, the tensor read last, and what the kernel maps ahead.
    assert _MIB <= most <= 6 * _MIB


def test_parts_of_tensors_are_the_same_across_mappings(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "MAPPED_BYTES", 1)
    whole = _MIB // 4
    cuts = {key: Cut(0, 8, 16, whole) for key in checkpoint.files}
    read = {key: part.tolist() for key, part in checkpoint.read(checkpoint.files, cuts)}
    assert read == {f"w{i:02}": [float(i)] * 8 for i in range(_TENSORS)}
