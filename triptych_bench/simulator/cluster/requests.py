"""Planned requests as the cluster sees them: items with keys and plans, prompts of token ids. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.hashing import mm_hash
from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych_bench.goodput.load.workload import Picture, PlannedRequest
from triptych_bench.simulator.costs.costs import ModelShape

NAMESPACE, MODALITY = "0" * 64, "image"
#: Bytes of a JPEG file per pixel at the load generator's quality, by what is drawn.
JPEG_BYTES = {"noise": 0.61, "waves": 0.17, "photos": 0.1, "documents": 0.2, "screenshots": 0.12}
#: float32 values of one pixel as the tower takes it: three colours, a still picture as two frames.
_PREPARED_BYTES = 3 * 2 * 4
_TEMPLATE_TOKEN, _ITEM_TOKEN, _FIRST_TEXT_TOKEN = 1, 2, 3


@dataclass(frozen=True, slots=True)
class SimulatedItem:
    """A picture: what encoders and the store need to know of it. `pixels` before its resize.

    `media` stands for its file's `media_bytes`: the proxy hashes it.
    """

    plan: ItemPlan
    media: bytes
    patches: int
    pixels: int
    prepared_bytes: int
    media_bytes: int


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request. `items` are distinct, `features` in prompt order; `text` stands for that in messages."""

    index: int
    name: str
    output_tokens: int
    text_tokens: int
    prompt_token_ids: tuple[int, ...]
    features: tuple[MMFeature, ...]
    items: dict[str, SimulatedItem]
    text: str
    output_token: int

    @property
    def media_bytes(self) -> int:
        return sum(self.items[feature.mm_hash].media_bytes for feature in self.features)


class RequestMaker:
    """Makes prompts as the load generator's: template, pictures, text, the end of the template."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        self._shape, self._seed = shape, seed
        #: Those made until now, by mm_hash, and by picture: equal pictures are one item.
        self.items: dict[str, SimulatedItem] = {}
        self._by_picture: dict[Picture, SimulatedItem] = {}

    def make(self, index: int, planned: PlannedRequest) -> SimulatedRequest:
        shape, items = self._shape, [self.item(picture) for picture in planned.pictures]
        head, before = shape.prompt_overhead_tokens // 2, (shape.item_overhead_tokens + 1) // 2
        tokens, features = [_TEMPLATE_TOKEN] * head, list[MMFeature]()
        for plan in (item.plan for item in items):
            tokens += [_TEMPLATE_TOKEN] * before
            features.append(MMFeature(plan, Placement(len(tokens), plan.length)))
            tokens += [_ITEM_TOKEN] * plan.length + [_TEMPLATE_TOKEN] * (shape.item_overhead_tokens - before)
        # A token per text stands for all of its own: no two texts have a common beginning.
        text = _FIRST_TEXT_TOKEN + planned.seed * 2 % 0x7FFFFFF0
        tokens += [text] * planned.text_tokens + [_TEMPLATE_TOKEN] * (shape.prompt_overhead_tokens - head)
        return SimulatedRequest(
            index=index,
            name=f"r{index}",
            output_tokens=planned.output_tokens,
            text_tokens=planned.text_tokens,
            prompt_token_ids=tuple(tokens),
            features=tuple(features),
            items={item.plan.mm_hash: item for item in items},
            text=str(planned.seed),
            output_token=text + 1,
        )

    def item(self, picture: Picture) -> SimulatedItem:
        if (known := self._by_picture.get(picture)) is not None:
            return known
        patches, rows = self._shape.plan(picture.width, picture.height)
        pixels, media = picture.width * picture.height, f"{self._seed} {picture}".encode()
        key = mm_hash(media, namespace=NAMESPACE, modality=MODALITY)
        width, grid = self._shape.row_bytes // 2, (1, 1, patches)
        plan = ItemPlan(key, NAMESPACE, MODALITY, rows, width, "bfloat16", rows, grid_thw=grid)
        media_bytes = round(JPEG_BYTES[picture.content] * pixels)
        prepared_bytes = patches * self._shape.patch**2 * _PREPARED_BYTES
        made = SimulatedItem(plan, media, patches, pixels, prepared_bytes, media_bytes)
        self._by_picture[picture] = self.items[key] = made
        return made
