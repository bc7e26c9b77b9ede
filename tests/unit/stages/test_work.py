"""Bytes and operations by the tensors of a checkpoint."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from benchmarks.stages.work import Stage, Weights, tensor_shapes
from triptych.errors import ConfigError
from triptych.models.base import DecoderGeometry

GEOMETRY = DecoderGeometry(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    vocab_size=100,
    position_rows=3,
    max_position_embeddings=512,
)
SHAPES = {
    "model.language_model.layers.0.mlp.up_proj.weight": [64, 32],
    "model.language_model.norm.weight": [32],
    "model.language_model.embed_tokens.weight": [100, 32],
    "lm_head.weight": [100, 32],
    "model.visual.blocks.0.attn.qkv.weight": [48, 16],
    "model.visual.blocks.1.attn.qkv.weight": [48, 16],
    "model.visual.merger.linear_fc1.weight": [64, 64],
    "model.visual.pos_embed.weight": [49, 16],
}


def checkpoint(folder: Path, shapes: dict[str, list[int]]) -> Path:
    """A file with a header and no data."""
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()
    }
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return folder


def test_weights_are_counted_by_what_they_are_read_for(tmp_path: Path) -> None:
    found = Weights.of(checkpoint(tmp_path, SHAPES))
    assert (found.decoder, found.head) == (64 * 32, 100 * 32)  # neither the embedding table nor norms
    assert (found.tower, found.merger) == (2 * 48 * 16, 64 * 64)
    assert (found.tower_layers, found.tower_width) == (2, 16)
    assert tensor_shapes(tmp_path / "model.safetensors")["lm_head.weight"] == (100, 32)


def test_a_step_reads_weights_once_and_every_sequences_keys_and_values(tmp_path: Path) -> None:
    found = Weights.of(checkpoint(tmp_path, SHAPES))
    cached = 2 * 2 * 2 * 8  # keys and values, layers, heads, numbers
    assert found.step_bytes(GEOMETRY, 3, 10, 2) == 2 * (64 * 32 + 100 * 32 + 3 * 10 * cached)


def test_operations_of_prefill_and_tower(tmp_path: Path) -> None:
    found = Weights.of(checkpoint(tmp_path, SHAPES))
    linear = 2 * (64 * 32 * 5 + 100 * 32)
    seen = 5 * 7 + 15  # each of 5 tokens sees 7 before the chunk, and those up to itself
    assert found.prefill_operations(GEOMETRY, 5, 7) == linear + 4 * seen * 4 * 8 * 2
    assert found.tower_operations(8, 4) == 2 * (2 * 48 * 16 * 8 + 64 * 64 * 2) + 4 * 8 * 8 * 16 * 2


def test_a_checkpoint_without_a_tower_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Qwen-VL"):
        Weights.of(checkpoint(tmp_path, {"lm_head.weight": [4, 4]}))


def test_a_stage_says_which_share_of_its_limit_it_reaches() -> None:
    assert Stage("step", 0.02, 0.015, "reading").row() == ["step", "20", "15", "75%", "reading"]
    assert Stage("preprocess", 0.002).row() == ["preprocess", "2", "–", "–", "–"]
