"""What two workers must share to call their checkpoints one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.data.checkpoints import build_checkpoint, edit_config, edit_text_config
from support.zoo.checkpoint import checkpoint as zoo_checkpoint
from triptych.base.hashing import tower_of
from triptych.models import identity
from triptych.models.checkpoint.tensors import Checkpoint
from triptych.models.generic import ENCODER, KEYS
from triptych.models.identity import model_identity
from triptych.models.weights.loading import KeyMap

GENERIC = "LlavaNextForConditionalGeneration"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_checkpoint("qwen3_vl", tmp_path / "model")


def key(path: Path, dtype: str = "float32") -> str:
    return model_identity(path, dtype=dtype).model_key


_HOUR = 3_600_000_000_000


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all files had been written and linked an hour ago."""
    now = time.time_ns
    monkeypatch.setattr(identity.time, "time_ns", lambda: now() + _HOUR)


def change_weight(path: Path, name: str, index: int) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[index] += 1
    save_file(tensors, file)


def test_two_copies_of_a_folder_have_one_identity(model: Path, tmp_path: Path) -> None:
    copy = build_checkpoint("qwen3_vl", tmp_path / "elsewhere")
    assert model_identity(model, dtype="float32") == model_identity(copy, dtype=torch.float32)


def test_sharding_does_not_change_the_identity(model: Path, tmp_path: Path) -> None:
    sharded = build_checkpoint("qwen3_vl", tmp_path / "sharded", variant="sharded")
    assert key(model) == key(sharded)


def _tokenizer(path: Path) -> None:
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|im_done|>"))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: change_weight(path, "model.visual.blocks.0.mlp.linear_fc1.weight", -1),
        lambda path: change_weight(path, "lm_head.weight", 0),
        _tokenizer,
        lambda path: edit_text_config(path, rms_norm_eps=1e-5),
    ],
    ids=["a tower's last weight", "a text's first weight", "tokenizer", "config"],
)
def test_each_part_of_a_checkpoint_changes_the_identity(model: Path, change: Callable[[Path], None]) -> None:
    before = key(model)
    change(model)
    assert key(model) != before


def test_dtype_changes_the_identity(model: Path) -> None:
    assert key(model, "float32") != key(model, "bfloat16")


def test_a_revision_stands_for_the_weights(model: Path) -> None:
    before = model_identity(model, dtype="float32", revision="abc").model_key
    change_weight(model, "lm_head.weight", 0)
    assert model_identity(model, dtype="float32", revision="abc").model_key == before
    assert model_identity(model, dtype="float32", revision="def").model_key != before


def test_the_image_processor_changes_the_namespace_and_not_the_model_key(model: Path, tmp_path: Path) -> None:
    small = build_checkpoint("qwen3_vl", tmp_path / "small", variant="small")
    one, other = (model_identity(path, dtype="float32") for path in (model, small))
    assert one.model_key == other.model_key
    assert one.namespace != other.namespace


def _template(path: Path) -> None:
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")


def _calls(path: Path) -> None:
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(
        json.dumps({**tokenizer, "padding": {"direction": "Left"}}, indent=4)
    )


def _quantize(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    scale = (tensors[name].abs().amax() / 448).reshape(1)
    tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    save_file({**tensors, f"{name}_scale": scale}, file)
    edit_config(path, quantization_config={"quant_method": "fp8"}, pad_token_id=7)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: change_weight(path, "lm_head.weight", 0),
        lambda path: change_weight(path, "model.language_model.layers.1.mlp.up_proj.weight", 3),
        lambda path: edit_text_config(path, rope_theta=1e5, max_position_embeddings=7777),
        _template,
        _quantize,
    ],
    ids=["a head", "a layer", "longer prompts", "chat template", "quantized decoder"],
)
def test_a_checkpoint_with_the_same_tower_has_the_same_namespace(model, change, settled):
    before = model_identity(model, dtype="float32")
    change(model)
    after = model_identity(model, dtype="float32")
    assert after.model_key != before.model_key
    assert after.namespace == before.namespace


def test_how_a_tokenizer_is_called_and_written_out_is_no_vocabulary(model: Path) -> None:
    before = model_identity(model, dtype="float32").namespace
    _calls(model)
    assert model_identity(model, dtype="float32").namespace == before


@pytest.mark.parametrize(
    "change",
    [
        lambda path: change_weight(path, "model.visual.merger.linear_fc2.weight", 5),
        lambda path: change_weight(path, "model.visual.deepstack_merger_list.0.norm.weight", 5),
        lambda path: change_weight(path, "model.visual.blocks.0.attn.qkv.weight", 5),
        lambda path: edit_text_config(path, hidden_act="gelu"),
        lambda path: edit_config(path, image_token_id=3),
        _tokenizer,
    ],
    ids=["projector", "deepstack", "tower", "what rows might depend on", "placeholder", "vocabulary"],
)
def test_what_rows_or_plans_depend_on_changes_the_tower_of_a_namespace(model, change, settled):
    before = model_identity(model, dtype="float32").namespace
    change(model)
    assert tower_of(model_identity(model, dtype="float32").namespace) != tower_of(before)


def test_dtype_and_quantization_of_the_encoder_change_the_tower_and_the_decoders_does_not(model):
    def namespace(dtype: str, quantization: str) -> str:
        return model_identity(model, dtype=dtype, quantization=quantization).namespace

    assert namespace("float32", "none") == namespace("float32", "int8-decoder")
    kinds = [("float32", "none"), ("float32", "int8"), ("float32", "w8a8"), ("bfloat16", "none")]
    assert len({tower_of(namespace(*kind)) for kind in kinds}) == len(kinds)


def test_the_processor_leaves_the_tower_of_a_namespace(model: Path, tmp_path: Path) -> None:
    small = build_checkpoint("qwen3_vl", tmp_path / "small", variant="small")
    one, other = (model_identity(path, dtype="float32").namespace for path in (model, small))
    assert one != other and tower_of(one) == tower_of(other)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_how_releases_spell_keys_and_config_leaves_the_namespace(family: str, tmp_path: Path) -> None:
    own, hub = (build_checkpoint(family, tmp_path / (name or "own"), variant=name) for name in ("", "hub"))
    assert Checkpoint(own).files.keys() != Checkpoint(hub).files.keys()
    one, other = (model_identity(path, dtype="float32") for path in (own, hub))
    assert one.model_key != other.model_key and one.namespace == other.namespace


def test_any_class_shares_its_tower(tmp_path: Path, settled: None) -> None:
    path = shutil.copytree(zoo_checkpoint(GENERIC), tmp_path / "model")
    before = model_identity(path, dtype="float32").namespace
    change_weight(path, "language_model.model.layers.1.mlp.up_proj.weight", 1)
    assert model_identity(path, dtype="float32").namespace == before
    change_weight(path, "multi_modal_projector.linear_1.weight", 1)
    assert model_identity(path, dtype="float32").namespace != before


def test_a_class_whose_encoder_has_modules_of_a_decoders_names_shares_nothing(tmp_path, settled, monkeypatch):
    """As Apertus 1.5, whose pictures become tokens that its encoder embeds."""
    path = shutil.copytree(zoo_checkpoint(GENERIC), tmp_path / "model")
    others = KeyMap(encoder=((r"^(?!.*projector)", ""),), decoder=((r"", ""),))
    assert ENCODER.has_known_keys(path, KEYS) and not ENCODER.has_known_keys(path, others)
    monkeypatch.setattr(ENCODER, "has_known_keys", lambda path, keys: False)
    before = model_identity(path, dtype="float32").namespace
    change_weight(path, "language_model.model.layers.1.mlp.up_proj.weight", 1)
    assert model_identity(path, dtype="float32").namespace != before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # The module's own references: another test may have imported a package again.
        ("triptych.models.images.PIL.__version__", "0.0"),
        ("triptych.models.images.transformers.__version__", "0.0"),
        ("triptych.models.images.features.version", lambda name: f"another {name}"),
    ],
    ids=["Pillow", "transformers", "JPEG decoder"],
)
def test_the_versions_of_what_prepares_pictures_change_the_namespace(model, name, value, monkeypatch):
    before = model_identity(model, dtype="float32")
    monkeypatch.setattr(name, value)
    after = model_identity(model, dtype="float32")
    assert (after.model_key, after.namespace != before.namespace) == (before.model_key, True)


def test_the_digest_of_settled_files_is_remembered(model, cache, settled, monkeypatch):
    before = key(model)
    assert len(list(cache.rglob("*.json"))) == 1
    monkeypatch.setattr(identity, "_tensor_digests", lambda *_: pytest.fail("digested again"))
    assert key(model) == before


def test_files_written_just_now_are_not_remembered(model: Path, cache: Path) -> None:
    os.utime(model / "model.safetensors")
    key(model)
    assert not list(cache.rglob("*.json"))


def _flipped(file: Path, name: str, share: float) -> bytes:
    """The file's content with one bit of a tensor changed, so far into it."""
    content = bytearray(file.read_bytes())
    header, start = identity._header(file)
    begin, end = header[name]["data_offsets"]
    content[start + begin + int((end - begin - 1) * share)] ^= 1
    return bytes(content)


def _in_place(file: Path, content: bytes) -> None:
    with file.open("r+b") as target:
        target.write(content)


def _by_a_new_file(file: Path, content: bytes) -> None:
    aside = file.with_name("aside")
    aside.write_bytes(content)
    aside.replace(file)


def _and_ctime_too(file: Path, content: bytes) -> None:
    """As on a file system that keeps no such time: only the sampled content tells."""
    _in_place(file, content)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.visual.blocks.0.mlp.linear_fc1.weight"])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["first", "last"])
@pytest.mark.parametrize("rewrite", [_in_place, _by_a_new_file, _and_ctime_too])
def test_a_tensor_rewritten_with_size_and_time_restored_changes_the_identity(
    model: Path,
    settled: None,
    monkeypatch: pytest.MonkeyPatch,
    rewrite: Callable[[Path, bytes], None],
    share: float,
    name: str,
) -> None:
    if rewrite is _and_ctime_too:
        _without_ctime_and_inode(monkeypatch)
    before = key(model)
    file = model / "model.safetensors"
    stat = file.stat()
    rewrite(file, _flipped(file, name, share))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert key(model) != before


def _without_ctime_and_inode(monkeypatch: pytest.MonkeyPatch) -> None:
    made = identity._stamp

    def stamp(file: Path) -> list[object]:
        name, size, mtime, _, _, sampled = made(file)
        return [name, size, mtime, sampled]

    monkeypatch.setattr(identity, "_stamp", stamp)


def test_a_byte_that_no_sample_meets_is_noticed_by_the_time_of_change(model, settled, monkeypatch):
    monkeypatch.setattr(identity, "_pieces", lambda size, **_: [(0, min(size, 8))])
    before = key(model)
    file = model / "model.safetensors"
    stat = file.stat()
    _in_place(file, _flipped(file, "model.visual.blocks.0.mlp.linear_fc1.weight", 0.5))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert key(model) != before


def test_a_copy_with_its_times_has_the_same_identity(model: Path, tmp_path: Path, settled: None) -> None:
    before = model_identity(model, dtype="float32")
    subprocess.run(["cp", "-rp", str(model), str(tmp_path / "copy")], check=True)
    assert model_identity(tmp_path / "copy", dtype="float32") == before
    shutil.rmtree(model)
    subprocess.run(["cp", "-rp", str(tmp_path / "copy"), str(model)], check=True)
    assert model_identity(model, dtype="float32") == before


def test_a_damaged_memory_is_ignored(model: Path, cache: Path, settled: None) -> None:
    before = key(model)
    for file in cache.rglob("*.json"):
        file.write_text("{")
    assert key(model) == before
