"""--limit-mm-per-prompt: the values that it accepts, and the errors of requests above them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.data.items import make_plan
from triptych.base.errors import ConfigError, InvalidRequest
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


@pytest.mark.parametrize("text", ["", '{"image": 1}', '{"image": 0, "video": {"width": 64, "height": 64}}'])
def test_without_the_size_of_every_modality_each_token_may_have_an_embedding(text: str) -> None:
    decoder: Any = SimpleNamespace(modalities=("image", "video"), token_ids={})
    assert max_embeddings(parse_item_limits(text), decoder, Path("/nowhere"), 512) == 512
