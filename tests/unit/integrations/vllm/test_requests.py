"""Places of items in vLLM's requests, as the connector reads and completes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from triptych.base.types import ItemPlan
from triptych.integrations.vllm.requests import RequestItems

KEY = "a" * 64


@dataclass(frozen=True)
class Place:
    """vLLM's PlaceholderRange."""

    offset: int
    length: int
    is_embed: torch.Tensor | None = None

    def get_num_embeds(self) -> int:
        return self.length if self.is_embed is None else int(self.is_embed.sum())


@dataclass
class Feature:
    """vLLM's MultiModalFeatureSpec."""

    mm_position: Place
    data: Any = None
    modality: str = "video"
    identifier: str = KEY


@dataclass
class Request:
    mm_features: list[Feature]
    ec_transfer_params: Any = field(default_factory=dict)
    request_id: str = "r"


def needed(entry: object) -> tuple[Request, int]:
    request = Request([Feature(Place(4, 9))], {KEY: entry})
    (item,) = RequestItems(lambda modality: set()).needed(request, 0)
    return request, item.rows


def test_vllm_is_told_which_tokens_of_a_placeholder_take_rows():
    request, rows = needed({"namespace": "n", "runs": [[1, 3], [5, 2]]})
    place = request.mm_features[0].mm_position
    assert (place.offset, place.length, rows) == (4, 9, 5)
    assert place.is_embed is not None
    assert place.is_embed.tolist() == [False, True, True, True, False, True, True, False, False]


@pytest.mark.parametrize(
    "entry",
    [
        None,
        7,
        {"namespace": "n"},
        {"runs": "x"},
        {"runs": [[1, 3], [2, 2]]},
        {"runs": [[1, 0]]},
        {"runs": [[-1, 3]]},
        {"runs": [[5, 5]]},
        {"runs": [[1.5, 2]]},
        {"runs": [[1, 1 << 70]]},
    ],
)
def test_a_place_stays_as_it_is_where_the_request_names_no_part_of_it(entry):
    request, rows = needed(entry)
    assert request.mm_features[0].mm_position.is_embed is None
    assert rows == 9


def test_rows_that_do_not_fit_the_named_tokens_are_a_misfit():
    request = Request([Feature(Place(4, 9))], {KEY: {"runs": [[1, 3]]}})
    (item,) = RequestItems(lambda modality: set()).needed(request, 0)
    assert "its placeholder takes 3" in item.misfit(ItemPlan(KEY, "n", "video", 5, 4, "float32", 9))
