"""Every buffer is written as a whole at every replay, or nothing is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from triptych.base.machine.graphs import EagerStatic
from triptych.encoder_worker.graphs.manager import BudgetGraphMetadata, poison, write_buffers
from triptych.models.encoder_graph import EncoderCudaGraphConfig, pad_repeat_last

CONFIG = EncoderCudaGraphConfig(
    ("image",), ("pixel_values", "cu_seqlens"), 2, {"cu_seqlens": pad_repeat_last}
)


def buffers() -> dict[str, torch.Tensor]:
    made = {"pixel_values": torch.empty(4, 2), "cu_seqlens": torch.empty(4, dtype=torch.int32)}
    poison(made)
    return made


def values(rows: int = 3) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.ones(rows, 2), "cu_seqlens": torch.tensor([0, rows], dtype=torch.int32)}


def test_a_replay_writes_values_and_padding_over_all_that_was_there() -> None:
    written = buffers()
    write_buffers(written, values(), CONFIG)
    assert written["pixel_values"].tolist() == [[1, 1]] * 3 + [[0, 0]]
    assert written["cu_seqlens"].tolist() == [0, 3, 3, 3]


def test_offsets_of_two_buffers_are_padded_apart() -> None:
    """As if both were one buffer, the first's tail would hold the second's offsets."""
    config = EncoderCudaGraphConfig(
        ("image",),
        ("cu_seqlens", "cu_window_seqlens"),
        2,
        {"cu_seqlens": pad_repeat_last, "cu_window_seqlens": pad_repeat_last},
    )
    held = {key: torch.empty(5, dtype=torch.int32) for key in config.buffer_keys}
    poison(held)
    write_buffers(
        held,
        {"cu_seqlens": torch.tensor([0, 8]).int(), "cu_window_seqlens": torch.tensor([0, 4, 8]).int()},
        config,
    )
    assert held["cu_seqlens"].tolist() == [0, 8, 8, 8, 8]
    assert held["cu_window_seqlens"].tolist() == [0, 4, 8, 8, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": None}, r"missing \['cu_seqlens'\], not expected \[\]"),
        (
            {"pixel_valuescu_seqlens": torch.ones(1)},
            r"missing \[\], not expected \['pixel_valuescu_seqlens'\]",
        ),
        ({"pixel_values": torch.ones(5, 2)}, r"pixel_values: values \(5, 2\) do not fit the buffer \(4, 2\)"),
        ({"pixel_values": torch.ones(3, 1)}, r"pixel_values: values \(3, 1\) do not fit"),
        ({"pixel_values": torch.ones(3)}, r"pixel_values: values \(3,\) do not fit"),
        ({"cu_seqlens": torch.tensor([0.0, 3.0])}, "cu_seqlens: values of torch.float32 for a buffer of"),
    ],
)
def test_values_that_do_not_fit_are_an_error_and_nothing_is_written(
    change: dict[str, torch.Tensor | None], message: str
) -> None:
    held = buffers()
    given = {key: value for key, value in (values() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        write_buffers(held, given, CONFIG)
    assert held["pixel_values"].isnan().all()


def test_the_metadata_of_a_budget_is_what_a_replay_needs() -> None:
    names = [field.name for field in dataclasses.fields(BudgetGraphMetadata)]
    assert names == [
        "token_budget",
        "max_batch_size",
        "max_frames_per_batch",
        "graph",
        "input_buffers",
        "output_buffer",
    ]
    graph = EagerStatic().capture(lambda: None)
    made = BudgetGraphMetadata(4, 2, 2, graph, buffers(), torch.empty(4, 2))
    assert made.nbytes == 4 * 2 * 4 + 4 * 4 + 4 * 2 * 4
