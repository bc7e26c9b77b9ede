from __future__ import annotations

import pytest
import torch

from triptych.base.config import MIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.models.base import CrossGeometry, DecoderGeometry
from triptych.pd_worker.runner.capacity import (
    block_bytes,
    cross_limits_of,
    max_model_len,
    num_host_blocks,
    num_kv_blocks,
    uses_graphs,
)

GEOMETRY = DecoderGeometry(
    num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512, vocab_size=1000,
    position_rows=3, max_position_embeddings=40960,
)  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "device", "used"),
    [
        ("off", "cuda", False),
        ("auto", "cpu", False),
        ("auto", "cuda", True),
        ("static", "cpu", True),
        ("static", "cuda", True),
        ("cuda", "cuda", True),
    ],
)
def test_decode_graphs_are_used_where_asked_for_and_by_themselves_on_cuda(
    mode: str, device: str, used: bool
) -> None:
    assert uses_graphs(PDConfig(decode_graphs=mode), torch.device(device)) is used


def test_ranks_have_no_cuda_graphs_and_asking_for_both_is_an_error_with_the_remedy() -> None:
    assert not uses_graphs(PDConfig(decode_graphs="auto", tensor_parallel=2), torch.device("cuda"))
    with pytest.raises(ConfigError, match="--tensor-parallel 2 .* --decode-graphs off, or one rank"):
        uses_graphs(PDConfig(decode_graphs="cuda", tensor_parallel=2), torch.device("cuda"))


def test_ranks_run_over_static_buffers_each_with_its_own() -> None:
    assert uses_graphs(PDConfig(decode_graphs="static", tensor_parallel=2), torch.device("cpu"))


def test_the_memory_is_divided_into_whole_blocks() -> None:
    config = PDConfig(kv_memory=3 * MIB, max_model_len=256)
    assert num_kv_blocks(config, GEOMETRY, torch.float32) == 3 * MIB // (2 * 4 * 16 * 2 * 64 * 4)


def test_memory_below_one_longest_request_is_an_error_with_the_sum() -> None:
    config = PDConfig(kv_memory=MIB, max_model_len=1024)
    with pytest.raises(ConfigError, match=r"64 blocks of 16 tokens x 64.0 KiB = 4.0 MiB; raise --kv-memory"):
        num_kv_blocks(config, GEOMETRY, torch.float32)


def test_the_default_length_is_the_checkpoints_up_to_a_limit() -> None:
    assert max_model_len(PDConfig(), GEOMETRY, torch.float32) == 32768
    assert max_model_len(PDConfig(max_model_len=100), GEOMETRY, torch.float32) == 100


def test_the_default_length_is_no_more_than_the_memory_holds() -> None:
    config = PDConfig(kv_memory=MIB)
    assert max_model_len(config, GEOMETRY, torch.float32) == 256
    assert num_kv_blocks(config, GEOMETRY, torch.float32) * config.block_size == 256


def test_a_length_above_the_checkpoints_positions_is_an_error() -> None:
    with pytest.raises(ConfigError, match="40960 positions"):
        max_model_len(PDConfig(max_model_len=50000), GEOMETRY, torch.float32)


def test_audio_that_never_fits_the_kv_memory_is_an_error_at_the_start() -> None:
    cross = CrossGeometry(num_layers=2, num_kv_heads=4, head_dim=16, width=64, max_rows=1500)
    config = PDConfig(block_size=16)
    assert cross_limits_of(config, cross, 94 + 28, 448, whole=True).max_rows == 1500
    with pytest.raises(ConfigError, match="1500 encoder positions and --max-model-len 448 need 122"):
        cross_limits_of(config, cross, 94 + 27, 448, whole=True)
    assert cross_limits_of(config, cross, 30, 448, whole=False).num_blocks == 30


def test_host_blocks_are_those_that_swap_memory_holds() -> None:
    geometry = DecoderGeometry(2, 4, 4, 16, 64, 100, 1, 512)
    nbytes = block_bytes(geometry, 16, torch.float32)
    assert num_host_blocks(PDConfig(swap_memory=3 * nbytes + 1), geometry, torch.float32) == 0
    swapping = PDConfig(preemption="swap", swap_memory=3 * nbytes + 1)
    assert num_host_blocks(swapping, geometry, torch.float32) == 3
    with pytest.raises(ConfigError, match="--swap-memory 10 B holds no KV block"):
        num_host_blocks(PDConfig(preemption="swap", swap_memory=10), geometry, torch.float32)
