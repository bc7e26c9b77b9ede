"""Planned requests as the cluster sees them: items with keys and plans, prompts of token ids. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.goodput.load.workload import Picture, PlannedRequest
from triptych.hashing import mm_hash
from triptych.simulator.costs.costs import ModelShape
from triptych.types import ItemPlan, MMFeature, Placement

NAMESPACE = "0" * 64
MODALITY = "image"
#: Bytes of a JPEG file per pixel at the load generator's quality, by what is drawn.
JPEG_BYTES = {"noise": 0.61, "waves": 0.17}
#: float32 values of one pixel as the tower takes it: three colours, a still picture as two frames.
_PREPARED_BYTES = 3 * 2 * 4
_TEMPLATE_TOKEN, _ITEM_TOKEN = 1, 2
_FIRST_TEXT_TOKEN = 3


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
    """One request of the load. `items` are distinct; `features` stand in prompt order."""

    index: int
    name: str
    output_tokens: int
    text_tokens: int
    prompt_token_ids: tuple[int, ...]
    features: tuple[MMFeature, ...]
    items: dict[str, SimulatedItem]
    #: Stands for the text in the proxy's messages: no two texts have a common beginning.
    text: str
    output_token: int

    @property
    def media_bytes(self) -> int:
        return sum(self.items[feature.mm_hash].media_bytes for feature in self.features)


class RequestMaker:
    """Prompts are as the load generator's: template, pictures, text, the end of the template."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        self._shape = shape
        self._seed = seed
        #: Those made until now, by mm_hash.
        self.items: dict[str, SimulatedItem] = {}
        self._by_picture: dict[Picture, SimulatedItem] = {}

    def make(self, index: int, planned: PlannedRequest) -> SimulatedRequest:
        shape = self._shape
        head = shape.prompt_overhead_tokens // 2
        tokens = [_TEMPLATE_TOKEN] * head
        features: list[MMFeature] = []
        before = (shape.item_overhead_tokens + 1) // 2
        for picture in planned.pictures:
            plan = self.item(picture).plan
            tokens += [_TEMPLATE_TOKEN] * before
            features.append(MMFeature(plan, Placement(len(tokens), plan.length)))
            tokens += [_ITEM_TOKEN] * plan.length + [_TEMPLATE_TOKEN] * (shape.item_overhead_tokens - before)
        # A number per text stands for its words: no two texts have a common beginning.
        text = _FIRST_TEXT_TOKEN + planned.seed * 2 % 0x7FFFFFF0
        tokens += [text] * planned.text_tokens + [_TEMPLATE_TOKEN] * (shape.prompt_overhead_tokens - head)
        items = {item.plan.mm_hash: item for item in map(self.item, planned.pictures)}
        return SimulatedRequest(
            index=index,
            name=f"r{index}",
            output_tokens=planned.output_tokens,
            text_tokens=planned.text_tokens,
            prompt_token_ids=tuple(tokens),
            features=tuple(features),
            items=items,
            text=str(planned.seed),
            output_token=text + 1,
        )

    def item(self, picture: Picture) -> SimulatedItem:
        """Equal pictures are one item."""
        found = self._by_picture.get(picture)
        if found is None:
            found = self._by_picture[picture] = self._make_item(picture)
            self.items[found.plan.mm_hash] = found
        return found

    def _make_item(self, picture: Picture) -> SimulatedItem:
        patches, rows = self._shape.plan(picture.width, picture.height)
        pixels = picture.width * picture.height
        media = f"{self._seed} {picture}".encode()
        plan = ItemPlan(
            mm_hash=mm_hash(media, namespace=NAMESPACE, modality=MODALITY),
            namespace=NAMESPACE,
            modality=MODALITY,
            rows=rows,
            width=self._shape.row_bytes // 2,
            dtype="bfloat16",
            length=rows,
            grid_thw=(1, 1, patches),
        )
        media_bytes = round(JPEG_BYTES[picture.content] * pixels)
        prepared_bytes = patches * self._shape.patch**2 * _PREPARED_BYTES
        return SimulatedItem(plan, media, patches, pixels, prepared_bytes, media_bytes)
