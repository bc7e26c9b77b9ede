"""The choice between our product of few rows and oneDNN's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from triptych.kernels.cpu_linear import instructions_here
from triptych.kernels.library import kernel_library
from triptych.models.weights import prepack, product_choice
from triptych.models.weights.prepack import PrepackedLinear
from triptych.models.weights.product_choice import chip, choose_products, faster, parse_choice

needs_kernels = pytest.mark.skipif(
    kernel_library() is None or not prepack.can_prepack(torch.device("cpu"), torch.bfloat16),
    reason="no kernels, or no blocked bfloat16 weights",
)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(product_choice, "cache_folder", lambda: tmp_path / "kernels")
    return tmp_path / "kernels"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is measured; our kernel wins with one and with eight rows."""
    seen: list[tuple[str, int]] = []

    def times(layers: list[PrepackedLinear], rows: int) -> tuple[float, float]:
        seen.append((product_choice._shape(layers[0]), rows))
        return (1.0, 2.0) if rows in (1, 8) else (2.0, 1.0)

    monkeypatch.setattr(product_choice, "_times", times)
    return seen


def model(*sizes: tuple[int, int]) -> nn.ModuleList:
    """Prepacked layers whose layout is as if our kernel read it, whatever this chip's is."""
    layers = nn.ModuleList(PrepackedLinear(nn.Linear(*size).to(torch.bfloat16)) for size in sizes)
    for layer in layers:
        layer.block = layer.block or 64
    return layers


#: Numbers of rows for which our kernel multiplies a weight of this chip.
KNOWN = prepack.ROWS if instructions_here() == 4 else prepack.FEW_ROWS


def chosen(module: nn.ModuleList) -> list[tuple[int, ...]]:
    return [layer.chosen for layer in module]


def test_our_product_is_chosen_where_it_is_not_clearly_slower() -> None:
    assert faster({1: (1.0, 2.0), 2: (2.0, 2.0), 4: (2.3, 2.0), 8: (2.1, 2.0)}) == (1, 2, 8)


@needs_kernels
def test_each_shape_is_measured_once_on_a_machine_and_each_layer_follows(cache, measured):
    first = model((64, 64), (64, 128), (64, 64))
    choose_products(first)
    assert len(measured) == 2 * len(KNOWN) and set(chosen(first)) == {(1, 8)}
    assert [file.suffix for file in cache.iterdir()] == [".json"]
    second = model((64, 128), (64, 64))
    choose_products(second)
    assert len(measured) == 2 * len(KNOWN) and set(chosen(second)) == {(1, 8)}
    choose_products(model((64, 64)))
    assert len(measured) == 3 * len(KNOWN) and len(list(cache.iterdir())) == 2


@needs_kernels
@pytest.mark.parametrize("what", ["chip", "library_name", "threads", "onednn"])
def test_another_chip_build_or_number_of_threads_is_measured_again(what, cache, measured, monkeypatch):
    choose_products(model((64, 64)))
    if what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    elif what == "onednn":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "ANOTHER")
    else:
        monkeypatch.setattr(product_choice, what, lambda: "another")
    choose_products(model((64, 64)))
    assert len(measured) == 2 * len(KNOWN)


@needs_kernels
@pytest.mark.parametrize(("kernel", "rows"), [("triptych", KNOWN), ("onednn", ())])
def test_a_pinned_product_is_taken_and_nothing_is_measured(kernel, rows, cache, measured):
    pinned = model((64, 64))
    choose_products(pinned, kernel)
    assert chosen(pinned) == [rows] and not measured and not cache.exists()


HOSTILE = [
    *("", "{", "[]", "null", "1", "[" * 100_000, "{}", "\0" * 9),
    json.dumps({"64x64 in 32": "1"}),
    json.dumps({"64x64 in 32": [3]}),
    json.dumps({"64x64 in 32": [True]}),
    json.dumps({"64x64 in 32": [[1]]}),
    json.dumps({"64x64 in 32": [1.0]}),
    json.dumps({"64x64 in 32": [1], "more": [1]}),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_file_should_not_hold_is_no_choice(text: str) -> None:
    assert parse_choice(text, {"64x64 in 32": None}) is None
    assert parse_choice('{"64x64 in 32": [1, 8]}', {"64x64 in 32": None}) == {"64x64 in 32": (1, 8)}


@needs_kernels
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b" " * (2 << 20), None], ids=range(5))
def test_a_file_of_something_else_is_measured_again_and_written_anew(content, cache, measured):
    choose_products(model((64, 64)))
    (file,) = cache.iterdir()
    good = file.read_bytes()
    if content is None:
        file.unlink()
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    again = model((64, 64))
    choose_products(again)
    assert len(measured) == 2 * len(KNOWN) and chosen(again) == [(1, 8)]
    assert file.read_bytes() == good and list(cache.iterdir()) == [file]


@needs_kernels
def test_a_folder_that_cannot_be_written_costs_a_measurement_at_each_start(cache, measured, caplog):
    cache.write_text("a file")
    with caplog.at_level("INFO"):
        choose_products(model((64, 64)))
    assert len(measured) == len(KNOWN) and "each start measures" in caplog.text


@needs_kernels
def test_both_products_are_really_timed(cache: Path) -> None:
    layer = PrepackedLinear(nn.Linear(64, 64).to(torch.bfloat16))
    ours, theirs = product_choice._times([layer], 4)
    assert 0 < ours < 60 and 0 < theirs < 60


def test_a_module_without_layers_for_our_kernel_is_left_alone(cache: Path) -> None:
    choose_products(nn.Linear(8, 8))
    assert not cache.exists()


def test_a_chip_is_known_by_its_first_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: One\nflags\t: amx\ncpu MHz\t: 7\n\nmodel name\t: Two\n")
    assert "One" in chip(info) and "amx" in chip(info)
    assert "Two" not in chip(info) and "MHz" not in chip(info)
    assert chip(tmp_path / "none")
