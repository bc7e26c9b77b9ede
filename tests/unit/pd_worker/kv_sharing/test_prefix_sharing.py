"""Who shares prefixes, and what the log or an error says where nobody does."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from support.engine.engine_cell import Checkpoint, engine_cell
from triptych.base.config import MIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.base.metrics import PDMetrics
from triptych.pd_worker.kv_sharing.prefix_sharing import prefix_sharing

STORE = "unix:///tmp/no.sock"


def reason(caplog: pytest.LogCaptureFixture, cross: Any = None, **flags: Any) -> str:
    """What the log says of a decoder that does not share."""
    config: Any = PDConfig(**{"share_prefixes": "on", "store": STORE, **flags})
    decoder: Any = SimpleNamespace(cross=cross)
    nobody: Any = None
    with caplog.at_level(logging.WARNING):
        assert prefix_sharing(config, decoder, "key", nobody, nobody, PDMetrics("m")) is None
    (line,) = [record.getMessage() for record in caplog.records]
    return line


def test_an_encoder_decoder_model_does_not(caplog) -> None:
    assert "encoder-decoder" in reason(caplog, cross=object())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tensor_parallel": 2}, "--tensor-parallel"),
        ({"prefix_caching": False}, "leave out --no-prefix-caching"),
        ({"store": ""}, "give --store or --kv-store"),
    ],
)
def test_what_stands_in_the_way_is_named(flags, words, caplog) -> None:
    assert words in reason(caplog, **flags)


def test_a_store_that_is_none_is_refused_by_the_flags_name() -> None:
    checkpoint = Checkpoint.open("qwen3_vl")
    flags: dict[str, Any] = {"store": STORE, "kv_store": "nonsense://x", "share_prefixes": "on"}
    with pytest.raises(ConfigError, match="--kv-store: "), engine_cell(checkpoint, **flags):
        pass


def test_too_little_memory_for_a_group_is_named_with_its_size(caplog) -> None:
    checkpoint = Checkpoint.open("qwen3_vl")
    flags: dict[str, Any] = {"store": STORE, "share_memory": MIB // 64, "share_prefixes": "on"}
    with caplog.at_level(logging.WARNING), engine_cell(checkpoint, **flags) as cell:
        assert cell.engine.sharing is None
    assert any("half of --share-memory" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("flags", "saves", "looks"),
    [
        ({}, False, False),
        ({"share_prefixes": "on"}, True, True),
        ({"share_prefixes": "auto"}, True, True),
        ({"role": "prefill"}, True, False),
        ({"role": "decode"}, False, True),
        ({"role": "decode", "share_prefixes": "on"}, True, True),
    ],
)
def test_roles_share_what_a_hand_over_needs_and_the_flag_shares_all(flags, saves, looks) -> None:
    config = PDConfig(**flags)
    assert (config.saves_kv, config.looks_for_kv) == (saves, looks)
