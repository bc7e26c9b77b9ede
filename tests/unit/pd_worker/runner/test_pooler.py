"""The pooler: chunks of a request become one vector, however they are cut and however often they come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from triptych.pd_worker.core.pooling import Pooling
from triptych.pd_worker.runner.pooler import add_chunk, add_chunks, finish, score

HIDDEN = torch.randn(9, 16, generator=torch.Generator().manual_seed(3))


def state(pooling: Pooling | None) -> Any:
    return SimpleNamespace(request=SimpleNamespace(pooling=pooling), pooled_rows=None)


def chunk(of: Any, start: int, end: int) -> Any:
    return SimpleNamespace(state=of, start=start, end=end, count=end - start, pools=end == len(HIDDEN))


@pytest.mark.parametrize("cuts", [[(0, 9)], [(0, 4), (4, 9)], [(0, 4), (0, 6), (4, 9)], [(0, 4), (0, 9)]])
@pytest.mark.parametrize("method", ["last", "mean", "cls"])
def test_a_chunk_that_is_computed_again_counts_once(method, cuts):
    request = state(Pooling(method))
    vectors = [add_chunk(chunk(request, *cut), HIDDEN[slice(*cut)]) for cut in cuts]
    assert [vector is None for vector in vectors] == [end < 9 for _, end in cuts]
    expected = {"last": HIDDEN[-1], "mean": HIDDEN.mean(0), "cls": HIDDEN[0]}[method]
    torch.testing.assert_close(vectors[-1], expected)


def test_what_is_kept_does_not_change_with_the_step_s_buffer():
    request, buffer = state(Pooling("cls")), HIDDEN.clone()
    add_chunk(chunk(request, 0, 4), buffer[:4])
    buffer.zero_()
    torch.testing.assert_close(add_chunk(chunk(request, 4, 9), HIDDEN[4:]), HIDDEN[0])


def test_only_requests_with_a_complete_vector_have_one():
    whole, part, generates = state(Pooling(normalize=False)), state(Pooling()), state(None)
    batch = [chunk(generates, 8, 9), chunk(whole, 0, 9), chunk(part, 0, 5)]
    hidden = torch.cat([HIDDEN[8:], HIDDEN, HIDDEN[:5]])
    made = add_chunks(batch, hidden)
    assert made.keys() == {id(batch[1])}
    np.testing.assert_array_equal(np.frombuffer(made[id(batch[1])], "<f4"), HIDDEN[-1].numpy())


def test_a_vector_is_cut_before_its_length_becomes_one():
    given = np.frombuffer(finish(HIDDEN[0], Pooling(dimensions=4)), "<f4")
    cut = HIDDEN[0][:4].numpy()
    np.testing.assert_allclose(given, cut / np.linalg.norm(cut), rtol=1e-6)


@pytest.mark.parametrize(("ids", "odds"), [((2, 5), 3.0), ((2,), 4.0), ((), 7.0)])
def test_a_score_is_the_sigmoid_of_two_logits_of_one_or_of_the_head(ids, odds):
    logits = torch.tensor([7.0, 0.0, 4.0, 0.0, 0.0, 1.0])
    given = np.frombuffer(score(logits, Pooling(scores=True, score_ids=ids)), "<f4")
    np.testing.assert_allclose(given, [1 / (1 + np.exp(-odds))], rtol=1e-6)
