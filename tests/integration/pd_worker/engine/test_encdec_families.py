"""Every encoder-decoder family through the engine, in batches of one to eight, against `generate`."""

from __future__ import annotations

import pytest

from support.encdec.batches import ENC_DEC, answers_in_batches


@pytest.mark.parametrize("family", ["mbart", "trocr"])
def test_a_batch_is_answered_as_by_generate(family: str) -> None:
    answers_in_batches(family, (4,))


@pytest.mark.slow
@pytest.mark.parametrize("family", ENC_DEC)
def test_batches_of_one_to_eight_are_answered_as_by_generate(family: str) -> None:
    answers_in_batches(family, range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["blockwise"])
@pytest.mark.parametrize("family", ENC_DEC)
def test_every_backend_answers_as_generate(family: str, backend: str) -> None:
    answers_in_batches(family, (1, 5), backend=backend)
