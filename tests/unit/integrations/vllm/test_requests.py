"""vLLM's requests as the park table sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from triptych.integrations.vllm.requests import ROWS, RequestItems, grid_of, needed_item, save_order

KEY = "a" * 64
SIZES = {"image_grid_thw"}


@dataclass
class Place:
    offset: int
    length: int
    is_embed: Any = None

    def get_num_embeds(self) -> int:
        return self.length if self.is_embed is None else int(self.is_embed.sum())


@dataclass
class Data:
    fields: dict[str, Any]

    def get_data(self) -> dict[str, Any]:
        return self.fields


@dataclass
class Feature:
    mm_position: Place
    data: Data | None = None
    modality: str = "image"
    identifier: str = KEY


@dataclass
class Request:
    mm_features: list[Feature]
    request_id: str = "r"


def grid(*sizes: int) -> Data:
    return Data({"image_grid_thw": torch.tensor(sizes)})


def test_an_item_that_only_sizes_its_placeholder_has_no_media():
    item = needed_item(Feature(Place(3, 4), grid(1, 4, 4)), SIZES)
    assert (item.identifier, item.rows, item.has_media, item.grid) == (KEY, 4, False, (1, 4, 4))


def test_an_item_with_only_its_rows_or_a_grid_that_its_model_lacks_has_no_media():
    assert not needed_item(Feature(Place(3, 4), Data({ROWS: torch.tensor([4])})), set()).has_media
    assert not needed_item(Feature(Place(3, 4), grid(1, 4, 4)), set()).has_media


def test_an_item_with_pixels_has_media():
    data = Data(grid(1, 4, 4).fields | {"pixel_values": torch.zeros(16, 2)})
    assert needed_item(Feature(Place(3, 4), data), SIZES).has_media


def test_a_grid_is_read_whatever_its_shape():
    assert grid_of({"image_grid_thw": torch.tensor([[1, 2, 4]])}) == (1, 2, 4)
    assert grid_of({"video_grid_thw": torch.tensor([8, 2, 4])}) == (8, 2, 4)
    assert grid_of({"image_grid_thw": None}) == grid_of({}) == ()


def test_a_save_order_has_what_other_pd_workers_need_of_the_item():
    place = Place(3, 6, torch.tensor([False, True, True, False, True, False]))
    order = save_order(Feature(place, grid(1, 2, 6)))
    assert (order.identifier, order.modality, order.length, order.grid) == (KEY, "image", 6, (1, 2, 6))
    assert order.runs == ((1, 2), (4, 1))
    assert save_order(Feature(Place(3, 6))).runs is None


@dataclass
class Fields:
    asked: list[str] = field(default_factory=list)

    def __call__(self, modality: str) -> set[str]:
        self.asked.append(modality)
        return SIZES


def test_an_item_is_needed_until_its_last_token_is_computed():
    items = RequestItems(Fields())
    request = Request([Feature(Place(2, 4), identifier="first"), Feature(Place(10, 4), identifier="second")])
    needed = [[item.identifier for item in items.needed(request, done)] for done in (0, 5, 6, 13, 14)]
    assert needed == [["first", "second"], ["first", "second"], ["second"], ["second"], []]


def test_a_requests_items_are_read_once_until_it_grows_or_ends():
    fields = Fields()
    items = RequestItems(fields)
    request = Request([Feature(Place(2, 4))])
    for _ in range(3):
        items.needed(request, 0)
    assert len(fields.asked) == 1
    request.mm_features.append(Feature(Place(8, 4)))
    assert len(items.needed(request, 0)) == 2
    assert len(fields.asked) == 3
    items.finished(request.request_id)
    items.needed(request, 0)
    assert len(fields.asked) == 5
