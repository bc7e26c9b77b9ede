"""The bytes and FLOPs of stages, by hand, and the share of a device's limit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.device_limits import DecoderSize, DeviceLimits, Work, decoder_size, tower_work
from support.data.checkpoints import build_checkpoint
from triptych.models.registry import load_decoder, load_encoder

#: 1000 bytes and 4000 FLOPs a second.
LIMITS = DeviceLimits(1000.0, 4000.0)
SIZE = DecoderSize(weight_bytes=1000, layer_weights=400, head_weights=100, token_bytes=16, attention_width=8)


@pytest.mark.parametrize(
    ("work", "seconds", "said"),
    [
        (Work(1000, 400), 2.0, "0.50 of bandwidth"),
        (Work(100, 8000), 2.5, "0.80 of arithmetic"),
        (Work(1000, 4000), 1.0, "1.00 of bandwidth"),
    ],
)
def test_the_longer_of_both_times_is_the_limit(work: Work, seconds: float, said: str) -> None:
    assert work.ratio(seconds, LIMITS) == said


def test_a_decode_step_reads_the_weights_once_and_every_sequences_cache() -> None:
    assert SIZE.decode(1, 10) == Work(1000 + 10 * 16, 2 * 500 + 4 * 10 * 8)
    assert SIZE.decode(3, 10) == Work(1000 + 3 * 10 * 16, 3 * (2 * 500 + 4 * 10 * 8))


def test_a_prefill_needs_the_head_once_and_half_of_all_pairs() -> None:
    assert SIZE.prefill(10) == Work(1000 + 10 * 16, 2 * (10 * 400 + 100) + 2 * 100 * 8)
    # Behind 7 tokens, each of the 10 sees those too.
    more = SIZE.prefill(10, 7)
    assert (more.nbytes, more.flops) == (1000 + 17 * 16, SIZE.prefill(10).flops + 4 * 7 * 10 * 8)


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_of_embeddings_is_read_only_where_it_is_the_head(tied: bool) -> None:
    module = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(50, 4),
            "layer": torch.nn.Linear(4, 6),
            "head": torch.nn.Linear(4, 50, False),
        }
    )
    if tied:
        module["head"].weight = module["embed"].weight
    geometry = SimpleNamespace(vocab_size=50, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
    decoder = SimpleNamespace(geometry=geometry, module=module, dtype=torch.float32)
    size = decoder_size(decoder)  # type: ignore[arg-type]
    # The layer's weight and bias, and the head.
    assert size.weight_bytes == 4 * (24 + 6 + 200)
    assert (size.layer_weights, size.head_weights) == (24, 200)
    assert size.token_bytes == 2 * 2 * 2 * 8 * 4
    assert size.attention_width == 2 * 4 * 8


def test_the_work_of_a_towers_linear_layers_is_counted_even_where_they_are_prepacked(
    prepack_all: None,
) -> None:
    path = build_checkpoint("llava")
    options = {"device": torch.device("cpu"), "dtype": torch.float32}
    encoder = load_encoder(path, **options)
    item = encoder.preprocess(encoder.sample(), {})
    weights = [p for p in encoder.module.parameters() if p.dim() == 2]
    one, three = (tower_work(encoder, [item] * count) for count in (1, 3))
    # Position embeddings are added, not multiplied: the least is what all linear layers need.
    assert one.flops > 2 * item.rows * sum(weight.numel() for weight in weights) * 0.5
    assert three.flops == pytest.approx(3 * one.flops)
    assert three.nbytes == one.nbytes


def test_a_checkpoints_decoder_is_measured_with_its_head() -> None:
    decoder = load_decoder(
        build_checkpoint("qwen3_vl"), device=torch.device("cpu"), dtype=torch.float32,
        attn_implementation="sdpa",
    )  # fmt: skip
    size = decoder_size(decoder)
    geometry = decoder.geometry
    assert size.head_weights == geometry.vocab_size * geometry.hidden_size
    assert size.weight_bytes >= 4 * (size.layer_weights + size.head_weights)
