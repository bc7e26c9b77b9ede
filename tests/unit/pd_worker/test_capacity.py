from __future__ import annotations

import pytest
import torch

from triptych.config import MIB, PDConfig
from triptych.errors import ConfigError
from triptych.models.base import DecoderGeometry
from triptych.pd_worker.capacity import block_bytes, max_model_len, num_kv_blocks

GEOMETRY = DecoderGeometry(
    num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512, vocab_size=1000,
    position_rows=3, max_position_embeddings=40960,
)  # fmt: skip


def test_a_block_counts_keys_and_values_of_all_layers() -> None:
    assert block_bytes(GEOMETRY, 16, torch.bfloat16) == 2 * 4 * 16 * 2 * 64 * 2


def test_the_memory_is_divided_into_whole_blocks() -> None:
    config = PDConfig(kv_memory=3 * MIB, max_model_len=256)
    assert num_kv_blocks(config, GEOMETRY, torch.float32) == 3 * MIB // (2 * 4 * 16 * 2 * 64 * 4)


def test_memory_below_one_longest_request_is_an_error_with_the_sum() -> None:
    config = PDConfig(kv_memory=MIB, max_model_len=1024)
    with pytest.raises(ConfigError, match=r"64 blocks of 16 tokens x 64.0 KiB = 4.0 MiB; raise --kv-memory"):
        num_kv_blocks(config, GEOMETRY, torch.float32)


def test_the_default_length_is_the_checkpoints_up_to_a_limit() -> None:
    assert max_model_len(PDConfig(), GEOMETRY) == 32768
    assert max_model_len(PDConfig(max_model_len=100), GEOMETRY) == 100


def test_a_length_above_the_checkpoints_positions_is_an_error() -> None:
    with pytest.raises(ConfigError, match="40960 positions"):
        max_model_len(PDConfig(max_model_len=50000), GEOMETRY)
