"""Folders that hold no checkpoint: one sentence with the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.data.checkpoints import build_checkpoint
from triptych.base.errors import ConfigError
from triptych.models.checkpoint import folder
from triptych.models.checkpoint.folder import Checkpoint, Cut
from triptych.models.registry import family_of


def test_a_folder_that_does_not_exist_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist: give MODEL=/folder with config\.json and"):
        family_of(tmp_path / "nowhere")


def test_a_folder_without_config_json_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json: give MODEL=/folder"):
        Checkpoint(tmp_path)


def test_config_json_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("<html>")
    with pytest.raises(ConfigError, match="cannot be read"):
        Checkpoint(tmp_path)


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    path = build_checkpoint("llava", tmp_path / "model")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only pytorch_model\.bin, and pickles are never loaded"):
        Checkpoint(path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    path = build_checkpoint("llava", tmp_path / "model")
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no weights: give MODEL=/folder"):
        Checkpoint(path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = build_checkpoint("llava", tmp_path / "model", variant="sharded")
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks model-00002-of-00003\.safetensors"):
        Checkpoint(path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = build_checkpoint("llava", tmp_path / "model")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        Checkpoint(path)


@pytest.mark.parametrize("cut", [Cut(0, 16, 32, 64), Cut(1, 48, 64, 64)])
def test_of_a_cut_tensor_only_the_part_is_read(cut: Cut) -> None:
    key = "model.language_model.layers.0.self_attn.q_proj.weight"
    checkpoint = Checkpoint(build_checkpoint("llava"))
    [(_, whole)], [(_, part)] = checkpoint.read([key]), checkpoint.read([key], {key: cut})
    assert torch.equal(part, cut.of(whole))
    assert part.numel() == 16 * 64


def test_an_unknown_architecture_is_answered_with_the_families(tmp_path: Path) -> None:
    path = build_checkpoint("llava", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT9ForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"GPT9ForCausalLM.*Qwen3-VL.*Qwen2\.5-VL.*LLaVA-1\.5"):
        family_of(path)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "llava"])
def test_a_config_without_architectures_is_known_by_its_model_type(family: str, tmp_path: Path) -> None:
    path = build_checkpoint(family, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    del config["architectures"]
    (path / "config.json").write_text(json.dumps(config))
    assert family_of(path).name == family


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


def test_files_are_mapped_anew_so_that_read_pages_do_not_stay(checkpoint, monkeypatch):
    monkeypatch.setattr(folder, "MAPPED_BYTES", 2 * _MIB)
    file = checkpoint.path / "model.safetensors"
    most = 0
    for key, tensor in checkpoint.read(checkpoint.files):
        assert float(tensor.sum()) == int(key[1:]) * tensor.numel()
        most = max(most, resident(file))
    # Up to two MiB, the tensor read last, and what the kernel maps ahead.
    assert _MIB <= most <= 6 * _MIB


def test_parts_of_tensors_are_the_same_across_mappings(checkpoint, monkeypatch):
    monkeypatch.setattr(folder, "MAPPED_BYTES", 1)
    whole = _MIB // 4
    cuts = {key: Cut(0, 8, 16, whole) for key in checkpoint.files}
    read = {key: part.tolist() for key, part in checkpoint.read(checkpoint.files, cuts)}
    assert read == {f"w{i:02}": [float(i)] * 8 for i in range(_TENSORS)}
