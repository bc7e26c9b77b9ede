"""One table of what encoder-decoder models can be combined with, one error for the rest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from triptych.base.config import EncoderConfig, PDConfig
from triptych.base.errors import ConfigError
from triptych.models.checkpoint.folder import read_config
from triptych.models.checkpoint.support import (
    MATRIX,
    check_supported,
    table,
    wanted_by_checkpoint,
    wanted_by_flags,
)

ROOT = Path(__file__).parents[4]
PATH = Path("model")


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row.name)
def test_a_row_is_served_or_raises_the_one_error_with_its_remedy(row) -> None:  # type: ignore[no-untyped-def]
    if row.served:
        check_supported(PATH, [row.name])
        return
    with pytest.raises(ConfigError, match="cannot be served") as refused:
        check_supported(PATH, [row.name])
    assert row.title in str(refused.value)
    assert str(refused.value).endswith(row.remedy)


def test_every_unserved_row_is_asked_for_by_a_flag_or_a_checkpoint() -> None:
    everything = PDConfig(
        tensor_parallel=2,
        pipeline_parallel=2,
        speculative_model="small",
        kv_cache_dtype="fp8",
        quantization="int8",
        device="cuda",
    )
    elsewhere = PDConfig(device="xpu")
    config = {"quantization_config": {"bits": 4}, "is_encoder_decoder": True, "sliding_window": 64}
    asked = {
        *wanted_by_flags(everything),
        *wanted_by_flags(elsewhere),
        *wanted_by_checkpoint(config, ["adapter_config.json"]),
    }
    refused = {row.name for row in MATRIX if not row.served}
    assert asked == refused | {"tensor_parallel", "int8"}


def test_the_page_has_the_table_of_the_code() -> None:
    page = (ROOT / "docs/engine/encoder-decoder.md").read_text()
    [shown] = re.findall(r"<!-- support -->\n\n(.*)\n\n<!-- /support -->", page, re.DOTALL)
    assert shown == table()


def test_every_test_named_in_the_table_exists() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", table())
    assert named
    assert not [path for path in named if not (ROOT / path).is_file()]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, []),
        ({"tensor_parallel": 2}, ["tensor_parallel"]),
        ({"pipeline_parallel": 2, "speculative_model": "small"}, ["pipeline_parallel", "speculative"]),
        ({"quantization": "int8"}, ["int8"]),
        ({"quantization": "int8-decoder", "device": "cuda:1"}, ["int8", "int8_cuda"]),
        ({"device": "mps"}, ["devices"]),
        ({"device": "xpu:1"}, ["devices"]),
        ({"quantization": "w8a8-decoder"}, ["w8a8"]),
        ({"kv_cache_dtype": "fp8"}, ["fp8_kv"]),
    ],
)
def test_flags_ask_for_rows(flags: dict[str, object], wanted: list[str]) -> None:
    assert wanted_by_flags(PDConfig(**flags)) == wanted  # type: ignore[arg-type]


def test_an_encoder_on_cuda_may_stand_before_a_decoder_in_8_bits() -> None:
    assert "int8_cuda" in wanted_by_flags(EncoderConfig(quantization="int8", device="cuda"))
    assert "int8_cuda" not in wanted_by_flags(EncoderConfig(quantization="int8-decoder", device="cuda"))


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "Quantized checkpoints"),
        ({"sliding_window": 64}, "Sliding windows"),
    ],
)
def test_a_checkpoint_that_asks_for_more_is_refused(change, title, tmp_path):
    path = build_checkpoint("bart", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=title):
        read_config(path)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    path = build_checkpoint("bart", tmp_path / "model")
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="LoRA adapters"):
        read_config(path)


def test_decoder_only_models_keep_their_windows() -> None:
    assert wanted_by_checkpoint({"sliding_window": 64}) == []
