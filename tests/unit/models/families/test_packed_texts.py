"""Texts in one row of tokens: each sees itself only, wherever it lies; BART's layer in float16."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from triptych.base.config import EncoderConfig
from triptych.encoder_worker.graphs.graph_encoder import graph_limits
from triptych.models.families.text_encoder import pad_own_segment
from triptych.models.registry import load_encoder

CPU = torch.device("cpu")
FAMILIES = pytest.mark.parametrize("family", ["bart", "mbart", "t5"])
BUDGET = 96


def loaded(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return load_encoder(build_checkpoint(family), device=CPU, dtype=dtype)


def ids(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


@torch.inference_mode()
def packed(encoder: Any, texts: list[bytes]) -> list[torch.Tensor]:
    """Rows of each text of token ids, from buffers of BUDGET tokens."""
    items = [encoder.preprocess(text, {"form": "token_ids"}) for text in texts]
    config = encoder.get_encoder_cudagraph_config()
    made = encoder.prepare_encoder_cudagraph_capture_inputs(BUDGET, 8, 8, CPU, encoder.dtype).values
    replay = encoder.prepare_encoder_cudagraph_replay_buffers(items, 8, 8).values
    for key, buffer in made.items():
        buffer[: len(replay[key])] = replay[key]
        config.padding(key)(buffer, len(replay[key]))
    rows: list[torch.Tensor] = encoder.split_encoder_cudagraph_output(
        encoder.encoder_cudagraph_forward(made), items
    )
    return rows


def test_padding_belongs_to_no_text() -> None:
    buffer = torch.tensor([0, 0, 1, 7, 7])
    pad_own_segment(buffer, 3)
    assert buffer.tolist() == [0, 0, 1, -1, -1]


@FAMILIES
def test_a_texts_rows_do_not_change_with_the_texts_beside_it(family: str) -> None:
    encoder = loaded(family)
    one, other = (packed(encoder, [ids(9, 12, 7), ids(*beside)]) for beside in ((5, 6, 7), (50, 60, 70)))
    assert torch.equal(one[0], other[0])
    assert not torch.allclose(one[1], other[1], atol=1e-2)


@pytest.mark.parametrize("louder", [1.0, 6e4])
@torch.inference_mode()
def test_in_float16_a_layer_of_bart_gives_what_its_own_code_gives(louder: float) -> None:
    encoder = loaded("bart", torch.float16)
    layer = encoder.module.layers[0]
    layer.final_layer_norm.weight.mul_(louder)
    hidden = torch.randn(1, 7, encoder.width, generator=torch.Generator().manual_seed(1)).half()
    mask = torch.eye(7, dtype=torch.bool)[None, None] | (torch.arange(7) < 4)
    wanted = layer(hidden, mask)
    assert (wanted.abs().max() > 6e4) == (louder > 1) and torch.isfinite(wanted).all()
    assert torch.equal(encoder.run_layer(layer, hidden, mask), wanted)


def test_no_budget_is_larger_than_the_longest_text_unless_a_worker_is_told_so() -> None:
    bart = loaded("bart")
    config = bart.get_encoder_cudagraph_config()
    maximum = graph_limits(EncoderConfig(encoder_batch_patches=16384), bart, config).budgets
    assert maximum == (64, 128, 256) and maximum[-1] == bart.config.max_position_embeddings
    told = EncoderConfig(encoder_batch_patches=16384, encoder_graph_budgets="512,64")
    assert graph_limits(told, bart, config).budgets == (64, 512)
    with pytest.raises(ValueError, match="max_token_budget: 32 is below min_token_budget 64"):
        dataclasses.replace(config, max_token_budget=32)
