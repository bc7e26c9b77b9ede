"""--limit-mm-per-prompt: the values that it accepts, and the errors of requests above them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.data.items import make_plan
from triptych.base.errors import ConfigError, InvalidRequest
from triptych.models.generic import processor
from triptych.pd_worker import item_limits
from triptych.pd_worker.frontend.input_processor import check_item_counts
from triptych.pd_worker.item_limits import ItemLimit, max_embeddings, parse_item_limits


def test_the_flag_takes_vllms_two_forms() -> None:
    given = parse_item_limits('{"image": 4, "video": {"count": 2, "num_frames": 8, "width": 64}}')
    assert given == {"image": ItemLimit(4), "video": ItemLimit(2, 64, None, 8)}
    assert parse_item_limits("") == {}


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"film": 1}', '{"image": -1}', '{"image": {"depth": 3}}', '{"video": {"num_frames": 9999}}'],
)
def test_another_value_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r'--limit-mm-per-prompt: .*; write it like \{"image": 0'):
        parse_item_limits(text)


def test_a_request_with_more_items_than_its_limit_is_refused() -> None:
    images = [make_plan(f"{number:064x}") for number in range(3)]
    check_item_counts(images, parse_item_limits('{"image": 3, "video": 0}'))
    with pytest.raises(InvalidRequest, match="3 images are more than the 2 .*; send fewer") as caught:
        check_item_counts(images, parse_item_limits('{"image": 2}'))
    assert caught.value.param == "messages"


ROW, MARKER = 7, 8


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """The embeddings of a prompt of 1000 tokens within limits: pictures have a marker for 3 rows, videos more
    markers the smaller their frames are."""

    def placeholder(processor: object, modality: str, limit: ItemLimit) -> list[int]:
        side = limit.width or 1
        if side > 500:
            raise ConfigError("too large")
        frame = [MARKER] * 12 + [ROW] * (side // 8)
        return (
            [ROW, ROW, ROW, MARKER] * (side // 8) if modality == "image" else frame * (limit.num_frames or 1)
        )

    monkeypatch.setattr(item_limits, "_placeholder", placeholder)
    monkeypatch.setattr(processor, "GenericProcessor", lambda *_: None)
    decoder: Any = SimpleNamespace(modalities=("image", "video"), token_ids={"image": 1}, row_token_ids={ROW})
    return lambda text: max_embeddings(parse_item_limits(text), decoder, Path("/nowhere"), 1000)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", 824),  # a prompt full of videos of 448 x 448: 56 of 68 tokens
        ('{"video": 0}', 750),
        ('{"image": 2, "video": 0}', 750),
        ('{"image": 0, "video": {"width": 64, "height": 64}}', 824),
        ('{"image": 0, "video": {"num_frames": 4, "width": 16, "height": 16}}', 8),
        ('{"image": {"width": 80, "height": 8}, "video": 0}', 30),
        ('{"image": 0, "video": 0}', 0),
    ],
)
def test_tokens_of_items_without_an_embedding_are_not_counted(rows_of, text, rows):
    assert rows_of(text) == rows


def test_where_no_item_can_be_made_or_no_processor_is_there_each_token_may_have_an_embedding(
    rows_of, monkeypatch
):
    monkeypatch.setattr(
        item_limits, "_USUAL", dict.fromkeys(("image", "video"), (ItemLimit(1, 900, 900, 4),))
    )
    assert rows_of("") == 1000
    decoder: Any = SimpleNamespace(modalities=("image", "video"), token_ids={})
    assert max_embeddings({}, decoder, Path("/nowhere"), 512) == 512
