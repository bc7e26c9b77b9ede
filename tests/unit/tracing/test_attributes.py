from __future__ import annotations

import pytest

from triptych.base.tracing import attributes as names
from triptych.base.types import OutputFormat, SamplingParams


def test_an_mm_hash_is_shortened() -> None:
    assert names.item("0123456789abcdef" * 4) == {"triptych.item.mm_hash": "0123456789ab"}


def test_only_parameters_that_the_client_set_are_named_and_none_that_holds_text() -> None:
    secret = SamplingParams(
        stop=("secret",), output_format=OutputFormat("regex", "secret"), logit_bias=((1, 2.0),), seed=7
    )
    assert names.sampling(secret, 1) == {}
    assert names.sampling(SamplingParams(top_p=0.9, frequency_penalty=0.5), 1) == {
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.frequency_penalty": 0.5,
    }


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:5000", {"server.address": "127.0.0.1", "server.port": 5000}),
        ("[::1]:5000", {"server.address": "::1", "server.port": 5000}),
        ("", {}),
        ("unix", {"server.address": "unix"}),
    ],
)
def test_a_workers_address_is_taken_apart(address: str, expected: dict[str, object]) -> None:
    assert names.server(address) == expected
