"""Both sides of a class under the adapter, requests for its engine, and what `generate` answers."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from support.engine.engine_cell import EngineCell
from support.engine.engine_requests import CountingText, greedy
from support.generic.classes import CLASSES, IMAGE, TinyItem, prompt, tiny_model
from triptych.base.types import ItemPlan, MMFeature, Placement, runs_of
from triptych.ec_connector.base import EncoderOutput
from triptych.models.base import PreparedItem
from triptych.models.generic.decoder import GenericDecoder
from triptych.models.generic.encoder import GenericEncoder
from triptych.models.generic.layout import ItemLayout
from triptych.models.generic.sides import base_of
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.core.request import EngineRequest

TOKENS = 24
#: Pictures of the prompts: one, two, and text alone.
PROMPTS = ((0,), (1, 2), ())


@dataclass
class GenericModel:
    """A tiny class, whole and by sides."""

    name: str
    whole: PreTrainedModel
    path: Path
    encoder: GenericEncoder
    decoder: GenericDecoder
    #: Rows are replaced by zeros, as a control.
    zeroed: bool = False
    _count: int = field(default=0)

    @classmethod
    def open(cls, name: str) -> GenericModel:
        whole, path = tiny_model(name)
        options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
        return cls(
            name,
            whole,
            path,
            GenericEncoder.without_processor(path, **options),
            GenericDecoder.load(path, **options, attn_implementation=ATTENTION_NAME),
        )

    def prompts(self) -> list[tuple[list[int], list[TinyItem]]]:
        return [prompt(CLASSES[self.name], seed, numbers) for seed, numbers in enumerate(PROMPTS, 1)]

    def reference(self, ids: Sequence[int], items: Sequence[TinyItem]) -> list[int]:
        """What generate answers greedily."""
        given = torch.tensor([list(ids)])
        joined = (
            {name: _joined([item.tensors[name] for item in items]) for name in items[0].tensors}
            if items
            else {}
        )
        types = (given == IMAGE).long()
        names = inspect.signature(base_of(self.whole).forward).parameters
        kinds = {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in names}
        out = self.whole.generate(
            input_ids=given, attention_mask=torch.ones_like(given), **joined, **kinds,
            do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS,
        )  # fmt: skip
        tokens: list[int] = out[0, len(ids) :].tolist()
        return tokens

    def request(self, cell: EngineCell, ids: list[int], items: Sequence[TinyItem]) -> EngineRequest:
        """A request whose pictures are encoded and stored."""
        features, offset = [], 0
        for item in items:
            feature, rows = self.feature(item, ids, offset)
            cell.store[feature.mm_hash] = EncoderOutput(feature.plan, rows)
            features.append(feature)
            offset = feature.placement.end
        given = self.decoder.prompt_inputs(ids, features)
        self._count += 1
        now = time.monotonic()
        return EngineRequest(
            request_id=f"request-{self._count}",
            attempt=1,
            proxy_id="proxy",
            arrival=now,
            deadline=now + 100,
            prompt_token_ids=ids,
            features=tuple(features),
            ready=frozenset(feature.mm_hash for feature in features),
            positions=given.positions,
            position_delta=given.delta,
            both_ways=given.spans,
            inputs=given.inputs,
            sampling=greedy(TOKENS),
            prefix_root=b"r" * 32,
            output=CountingText(TOKENS),
        )

    def feature(self, item: TinyItem, ids: list[int], start: int) -> tuple[MMFeature, torch.Tensor]:
        """The item where it stands in `ids` behind `start`, and its rows."""
        (rows,) = self.encoder.encode([PreparedItem(0, 0, (), 0, item.tensors)])
        if self.zeroed:
            rows = torch.zeros_like(rows)
        tokens = item.token_ids
        offset = next(i for i in range(start, len(ids)) if ids[i : i + len(tokens)] == tokens)
        mask = [token == IMAGE for token in tokens]
        names, width = self.decoder.capture.grid_names, len(self.decoder.capture.type_names)
        grids = {index: item.tensors[name] for index, name in enumerate(names) if name in item.tensors}
        layout = ItemLayout(tuple(tokens), tuple((int(takes),) * width for takes in mask), grids)
        name = hashlib.sha256(f"{self.name} {self.zeroed} {rows.sum()}".encode()).hexdigest()
        plan = ItemPlan(
            name, "n" * 64, "image", len(rows), rows.shape[1], "float32", len(tokens), runs_of(mask),
            layout=layout.encode(),
        )  # fmt: skip
        assert self.decoder.placeholder(plan) == tokens
        return MMFeature(plan, Placement(offset, len(tokens), plan.runs)), rows


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As a processor joins pictures: those of fewer tiles are padded."""
    count = max(tensor.shape[1] for tensor in tensors)
    if tensors[0].dim() != 5:
        return torch.cat(list(tensors))
    padded = [
        torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, 0, 0, count - tensor.shape[1])) for tensor in tensors
    ]
    return torch.cat(padded)
