"""Options of the tier of vLLM's KV cache."""

from __future__ import annotations

import pytest

from triptych.base.errors import ConfigError
from triptych.integrations.vllm.kv_chunks import KVChunks, TierOptions, parse_tier

NEEDED = {"store": "redis://store:6379/0", "model_key": "m@1"}


def test_a_store_and_a_word_for_the_weights_are_enough() -> None:
    assert parse_tier(NEEDED) == TierOptions("redis://store:6379/0", "m@1", 3600.0, 0.25)
    given = parse_tier(NEEDED | {"ttl_seconds": 60, "kv_store_share": 1})
    assert (given.ttl_seconds, given.share) == (60, 1)


def test_a_password_is_read_from_its_file_and_never_shown(tmp_path) -> None:
    (tmp_path / "password").write_text("hush\n")
    options = parse_tier(NEEDED | {"store_password_file": str(tmp_path / "password")})
    assert "hush" in options.store and "hush" not in repr(options)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_key": ""}, "has no model_key"),
        ({"model_key": None}, "has no model_key"),
        ({"store": ""}, "secondary_tiers has no store"),
        ({"store": "http://x"}, "secondary_tiers: "),
        ({"store": 3}, "store must be a text"),
        ({"ttl": 3}, "no option 'ttl'"),
        ({"ttl_seconds": 0}, "ttl_seconds must be a number from 1 to 604800"),
        ({"kv_store_share": True}, "kv_store_share must be a number from 0.01 to 1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changed, named) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_tier(NEEDED | changed)


def test_chunks_of_an_odd_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="even number"):
        KVChunks(parse_tier(NEEDED), "layout", 4097)
