"""Both sides of a recipe's checkpoint under the adapter, and its prompts as requests of an engine."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from support.engine.engine_cell import EngineCell
from support.zoo.checkpoint import checkpoint, model_of
from support.zoo.models import RECIPES, Prompt, token_types
from support.zoo.recipe import Item, Recipe
from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.ec_connector.base import EncoderOutput
from triptych.models.base import DecoderSide, EncoderSide, PreparedItem
from triptych.models.generic import DECODER, ENCODER
from triptych.models.generic.layout import ItemLayout
from triptych.models.registry import speed_up_decoder, speed_up_encoder
from triptych.models.weights import prepack
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.frontend.prompt import Prompt as BuiltPrompt


@dataclass
class Served:
    """The two sides, each loaded apart, and the rows of items that prompts have named."""

    recipe: Recipe
    path: Path
    encoder: EncoderSide
    decoder: DecoderSide
    _encoded: dict[str, EncoderOutput] = field(default_factory=dict)

    @classmethod
    def open(cls, name: str) -> Served:
        """Of both sides, as workers load them, with every weight packed, however small it is."""
        path = checkpoint(name)
        options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
        # Not by the registry, which has families of their own for some classes; without the processor, which
        # some classes have only on torchvision.
        decoder = DECODER.load(path, **options, attn_implementation=ATTENTION_NAME)
        return cls.of(name, ENCODER.without_processor(path, **options), decoder)

    @classmethod
    def of(cls, name: str, encoder: EncoderSide, decoder: DecoderSide) -> Served:
        """Of sides that were loaded, before anything in them is fused."""
        with (
            mock.patch.dict(prepack.MINIMUM, {torch.float32: 1}),
            mock.patch.object(prepack, "MIN_MANY_ROWS", 1),
        ):
            speed_up_decoder(decoder)
            speed_up_encoder(encoder)
        return cls(RECIPES[name], checkpoint(name), encoder, decoder)

    def request(self, cell: EngineCell, prompt: Prompt, count: int, *, blank: bool = False) -> EngineRequest:
        """A greedy request; with `blank` the rows of its items are zeros."""
        features = self.features(prompt)
        outputs = [self._encoded[feature.mm_hash] for feature in features]
        if blank:
            plans = [dataclasses.replace(output.plan, mm_hash="0" * 64) for output in outputs]
            outputs = [
                EncoderOutput(plan, torch.zeros_like(o.data)) for plan, o in zip(plans, outputs, strict=True)
            ]
            features = [MMFeature(plan, f.placement) for plan, f in zip(plans, features, strict=True)]
        for output in outputs:
            cell.store[output.plan.mm_hash] = output
        return self._request(cell, prompt.token_ids, features, count)

    def built(
        self, cell: EngineCell, prompt: BuiltPrompt, rows: Sequence[torch.Tensor], count: int
    ) -> EngineRequest:
        """A greedy request of a prompt as a PD worker builds it, with the rows of its items."""
        for feature, data in zip(prompt.features, rows, strict=True):
            cell.store[feature.mm_hash] = EncoderOutput(feature.plan, data)
        return self._request(cell, prompt.token_ids, prompt.features, count)

    def _request(
        self, cell: EngineCell, token_ids: Sequence[int], features: Sequence[MMFeature], count: int
    ) -> EngineRequest:
        given = self.decoder.prompt_inputs(token_ids, features)
        return cell.build(
            token_ids,
            features,
            count,
            given.positions,
            given.delta,
            both_ways=given.spans,
            inputs=given.inputs,
        )

    def features(self, prompt: Prompt) -> list[MMFeature]:
        """Where the items stand; each is encoded alone, once."""
        features, start = [], 0
        for item in prompt.items:
            plan = self._plan(item)
            start = _find(prompt.token_ids, item.token_ids, start)
            features.append(MMFeature(plan, Placement(start, plan.length, plan.runs)))
            start += plan.length
        return features

    def _plan(self, item: Item) -> ItemPlan:
        content = b"".join(item.tensors[name].numpy().tobytes() for name in sorted(item.tensors))
        name = hashlib.sha256(self.recipe.name.encode() + content).hexdigest()
        if name not in self._encoded:
            prepared = self.prepare(item)
            (rows,) = self.encoder.encode([prepared])
            plan = ItemPlan(
                name, "n" * 64, self.recipe.modality, prepared.rows, self.encoder.width, "float32",
                prepared.length, prepared.runs, prepared.grid_thw, prepared.layout,
            )  # fmt: skip
            self._encoded[name] = EncoderOutput(plan, rows)
        return self._encoded[name].plan

    def prepare(self, item: Item) -> PreparedItem:
        """The item as the encoder's own `preprocess` would give it."""
        runs, at = [], 0
        for is_row, run in groupby(item.token_ids, self.decoder.row_token_ids.__contains__):
            length = len(list(run))
            runs += [(at, length)] if is_row else []
            at += length
        capture: Any = self.decoder.capture  # type: ignore[attr-defined]
        types = token_types(self.recipe, model_of(self.recipe.name), torch.tensor([item.token_ids]))
        given = [types[name][0].tolist() for name in capture.type_names]
        grids = {
            index: item.tensors[name] for index, name in enumerate(capture.grid_names) if name in item.tensors
        }
        layout = ItemLayout(tuple(item.token_ids), tuple(zip(*given, strict=True)) or ((),) * at, grids)
        rows = sum(length for _, length in runs)
        return PreparedItem(rows, at, (), rows, dict(item.tensors), tuple(runs), layout.encode())


def _find(token_ids: Sequence[int], part: Sequence[int], start: int) -> int:
    count = len(part)
    return next(at for at in range(start, len(token_ids)) if list(token_ids[at : at + count]) == list(part))
