"""Every buffer is written as a whole at every replay, or nothing is."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.base.errors import ConfigError
from triptych.base.machine.graphs import EagerStatic
from triptych.encoder_worker.graphs.manager import BudgetGraphMetadata, poison, write_buffers
from triptych.encoder_worker.graphs.packing import parse_budgets, smallest_fitting, token_budgets
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
def test_values_that_do_not_fit_are_an_error_and_nothing_is_written(change, message):
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


@pytest.mark.parametrize(
    ("least", "most", "multiple", "budgets"),
    [
        (256, 4096, 1, (256, 512, 1024, 2048, 4096)),
        (100, 350, 1, (100, 200, 350)),
        (100, 100, 1, (100,)),
        (100, 101, 1, (100, 101)),
        (64, 16, 1, (64,)),
        (576, 5000, 576, (576, 1152, 2304, 4608)),
        (576, 100, 576, (576,)),
    ],
)
def test_budgets_double_from_the_least_and_end_with_the_most(least, most, multiple, budgets):
    assert token_budgets(least, most, multiple) == budgets


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 50), st.integers(1, 8), st.integers(1, 10_000))
def test_budgets_ascend_by_at_most_a_factor_of_two_and_are_multiples(multiple, items, most):
    budgets = token_budgets(multiple * items, most, multiple)
    assert budgets[0] == multiple * items
    assert all(one < other <= 2 * one for one, other in zip(budgets, budgets[1:], strict=False))
    assert all(budget % multiple == 0 for budget in budgets)
    assert budgets[-1] == budgets[0] or most - multiple < budgets[-1] <= most


def test_given_budgets_are_sorted_and_taken_once() -> None:
    assert parse_budgets("512,256, 512") == (256, 512)
    assert parse_budgets("1152,576", 576) == (576, 1152)


@pytest.mark.parametrize(
    ("text", "multiple", "message"),
    [
        ("256,many", 1, "--encoder-graph-budgets 256,many: give numbers of output rows"),
        ("0", 1, "--encoder-graph-budgets 0: 0 is below 1"),
        ("-576", 576, "-576 is below 1"),
        ("576,600", 576, "600 is no multiple of 576, the rows of one item of this model: give .*576,1152"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_with_the_flag(text: str, multiple: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_budgets(text, multiple)


def test_the_smallest_budget_with_room_is_taken() -> None:
    budgets = (100, 200, 350)
    assert [smallest_fitting(budgets, rows) for rows in (1, 100, 101, 350)] == [100, 100, 200, 350]
    assert smallest_fitting(budgets, 351) is None
