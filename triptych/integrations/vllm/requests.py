"""vLLM's requests as the park table sees them.

What is read of a request is spelled out in protocols, so that this module needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from triptych.base.types import prepared, runs_of
from triptych.base.vllm_classes import GRIDS, ROWS, SECONDS
from triptych.integrations.vllm.park_table import NeededItem


class VllmRange(Protocol):
    """A placeholder: `is_embed` is a tensor that says which of its tokens take a row, None for all."""

    offset: int
    length: int
    is_embed: Any

    def get_num_embeds(self) -> int: ...


class VllmItem(Protocol):
    """A processed item, field by field."""

    def get_data(self) -> Mapping[str, Any]: ...


class VllmFeature(Protocol):
    """An item in a request; `data` None where vLLM holds no processed fields of it."""

    data: VllmItem | None
    modality: str
    identifier: str
    mm_position: VllmRange


class VllmRequest(Protocol):
    request_id: str
    mm_features: Sequence[Any]
    ec_transfer_params: Any


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """What the worker must know of an item to save it, besides its rows. Plain: it crosses processes."""

    identifier: str
    modality: str
    length: int
    runs: tuple[tuple[int, int], ...] | None
    grid: tuple[int, ...]


def needed_item(feature: VllmFeature, placeholder_fields: set[str]) -> NeededItem:
    """The item; it has media if it has a field besides those that only say its size."""
    data = feature.data.get_data() if feature.data is not None else {}
    given = {name for name, value in data.items() if value is not None}
    return NeededItem(
        identifier=feature.identifier,
        rows=feature.mm_position.get_num_embeds(),
        has_media=bool(given - placeholder_fields - {*GRIDS, ROWS, SECONDS}),
        grid=grid_of(data),
    )


class Placed(msgspec.Struct):
    """What a request's `ec_transfer_params` say of the place of one item."""

    runs: tuple[tuple[int, int], ...]


def place_rows(feature: VllmFeature, entry: object) -> None:
    """Tells vLLM which tokens of a placeholder take a row, where the request says so.

    Its endpoint for token ids takes placeholders of rows alone, and its engine reads masks. Runs that are no
    part of the placeholder are none: then the item's rows do not fit, and the request fails.
    """
    try:
        runs = msgspec.convert(entry, prepared(Placed)).runs
    except msgspec.ValidationError:
        return
    place = feature.mm_position
    mask, end = torch.zeros(place.length, dtype=torch.bool), 0
    for start, count in runs:
        if start < end or count < 1 or start + count > place.length:
            return
        end = start + count
        mask[start:end] = True
    # Of vLLM's own class, which cannot be changed and counts once.
    place_class: Any = type(place)
    feature.mm_position = place_class(offset=place.offset, length=place.length, is_embed=mask)


def grid_of(data: Mapping[str, Any]) -> tuple[int, ...]:
    """The item's patch grid (frames, rows, columns); empty where it has none."""
    for name in GRIDS:
        value = data.get(name)
        if value is not None:
            return tuple(int(each) for each in value.flatten().tolist())
    return ()


def save_order(feature: VllmFeature) -> SaveOrder:
    """The order to save the item's rows once they are computed."""
    place = feature.mm_position
    return SaveOrder(
        identifier=feature.identifier,
        modality=feature.modality,
        length=place.length,
        runs=None if place.is_embed is None else runs_of(place.is_embed.tolist()),
        grid=grid_of(feature.data.get_data()) if feature.data is not None else (),
    )


class RequestItems:
    """The items of live requests, each read once: `ensure` comes for every request in every step."""

    def __init__(self, placeholder_fields: Callable[[str], set[str]]) -> None:
        """`placeholder_fields`: the fields of a modality that only size its placeholder."""
        self._placeholder_fields = placeholder_fields
        self._items: dict[str, list[tuple[int, NeededItem]]] = {}

    def needed(self, request: VllmRequest, num_computed_tokens: int) -> list[NeededItem]:
        """The items of which the engine has not computed the last token, in order."""
        items = self._items.get(request.request_id)
        # A streaming request grows.
        if items is None or len(items) != len(request.mm_features):
            params = request.ec_transfer_params
            entries = params if isinstance(params, Mapping) else {}
            for feature in request.mm_features:
                place_rows(feature, entries.get(feature.identifier))
            items = self._items[request.request_id] = [self._read(each) for each in request.mm_features]
        return [item for end, item in items if end > num_computed_tokens]

    def _read(self, feature: VllmFeature) -> tuple[int, NeededItem]:
        end = feature.mm_position.offset + feature.mm_position.length
        return end, needed_item(feature, self._placeholder_fields(feature.modality))

    def finished(self, request_id: str) -> None:
        """Forgets a request."""
        self._items.pop(request_id, None)
