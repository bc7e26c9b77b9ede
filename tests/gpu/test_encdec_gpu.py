"""Encoder-decoder models on a CUDA device against transformers' fp32 reference."""

from __future__ import annotations

import pytest

from support.encdec.batches import ENC_DEC, answers_in_batches

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("family", ENC_DEC)
def test_fp32_tokens_match_on_the_device(family: str, backend: str) -> None:
    answers_in_batches(family, (1, 4, 8), device="cuda", backend=backend)
