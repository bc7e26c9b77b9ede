"""What the published comparison was fitted to, and how near the rest of it is."""

from __future__ import annotations

import pytest

from benchmarks.published_epd.figures import (
    DOOR_ITEM,
    DOOR_TOKEN,
    ENCODER_DOOR_ITEM,
    FIGURES,
    TEXT_TOKENS,
    disaggregated,
    replicas,
)


def door_limit(text_tokens: int, images: int) -> float:
    """Requests per second at which the replicas' front door is full."""
    return 1 / (DOOR_ITEM * images + DOOR_TOKEN * text_tokens)


def test_fitted_figures_are_met() -> None:
    for figure in FIGURES:
        if "replicas" in figure.fitted:
            assert door_limit(TEXT_TOKENS[figure.text], figure.images) == pytest.approx(
                figure.replicas, rel=1e-3
            )
        if "disaggregated" in figure.fitted:
            assert 1 / (ENCODER_DOOR_ITEM * figure.images) == pytest.approx(figure.disaggregated)


def test_figures_that_were_not_fitted_are_near() -> None:
    left = [f for f in FIGURES if f.replicas is not None and "replicas" not in f.fitted]
    assert len(left) == 3
    for figure in left:
        assert figure.replicas is not None
        assert door_limit(TEXT_TOKENS[figure.text], figure.images) == pytest.approx(figure.replicas, rel=0.27)


def test_pictures_are_prepared_at_one_door_or_at_the_encoders() -> None:
    assert replicas().encoder.prepare(640 * 640) == 0
    assert replicas().proxy.take(items=4, media_bytes=10**6, prompt_tokens=400) == pytest.approx(
        1 / 6, rel=1e-3
    )
    assert disaggregated().encoder.prepare(640 * 640) == ENCODER_DOOR_ITEM
    assert disaggregated().pd == replicas().pd
