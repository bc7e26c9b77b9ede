"""The decoder side of any class: its own text model and head, and prompts admitted by capture."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from triptych.base.errors import ConfigError, InvalidRequest, reason_of
from triptych.base.types import ItemPlan, MMFeature
from triptych.models.base import DecoderSide, MergedEmbeds, PromptInputs
from triptych.models.checkpoint.config import load_config
from triptych.models.fused.layers import FusedDecoderLayer, fuse_layers
from triptych.models.fused.text_model import FusedTextModel, check_text_model
from triptych.models.generic.capture import CapturedPrompt, PromptCapture, modality_tokens
from triptych.models.generic.examine import Examined, examine
from triptych.models.generic.head import Head, outer_head
from triptych.models.generic.layout import ItemLayout
from triptych.models.generic.ranks import load_rank
from triptych.models.generic.sides import (
    decoder_of,
    empty_model,
    keep_decoder,
    load_side,
)
from triptych.models.geometry import DecoderGeometry
from triptych.models.parallel.plan import take_share
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.recurrent import cache_keyword, keep_inside

logger = logging.getLogger(__name__)

#: The processor's tensor of pictures' patches in time, height and width.
_GRID = "image_grid_thw"


class GenericDecoder(DecoderSide):
    """A class's decoder, called as its base calls it, with the inputs that a capture has recorded."""

    #: How prompts are admitted; both sides of a model name the same class.
    capture_class: ClassVar[type[PromptCapture]] = PromptCapture
    module: PreTrainedModel
    #: What computes in the place of the text model's own forward, where it follows Llama's pattern.
    _fused: FusedTextModel | None = None

    def __init__(
        self, module: PreTrainedModel, examined: Examined, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config: Any = module.config
        self.module = module
        self.device = device
        self.dtype = dtype
        self.geometry = examined.geometry
        self.layer_rules = examined.rules
        self.takes_inputs = examined.takes_inputs
        self.token_ids = modality_tokens(module.config)
        self.image_token_id = self.token_ids.get("image")
        self._decoder: Any = decoder_of(module)
        self._embedding: Any = module.get_input_embeddings()
        self.capture = self.capture_class(
            module,
            examined.modalities[0],
            examined.geometry.deepstack_levels,
            device=device if examined.takes_inputs and device.type != "meta" else None,
        )
        self.capture.container = examined.container
        self._embedded = examined.embedded
        self._modalities = examined.modalities
        self.modality = examined.modalities[0]  # type: ignore[misc]
        self._one_item = examined.one_item
        self._plain = examined.plain
        #: Whether a prompt of text needs no capture.
        self.counts_text, self._marks = examined.counts_text, examined.marks
        self.row_token_ids = self.capture_class.row_tokens(module.config)
        self._cache = ""
        if self.geometry.states:
            self._cache = cache_keyword(self._decoder.forward)
            keep_inside(self._decoder)

    @property
    def modalities(self) -> tuple[str, ...]:
        return self._modalities

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attn_implementation: str,
        quantize: bool = False,
        parallel: TensorParallel | None = None,
    ) -> Self:
        examined = examine(cls.read_config(path), dtype, cls.capture_class)
        model = cls.load_module(path, device=device, dtype=dtype, quantize=quantize, parallel=parallel)
        # Set afterwards: transformers would want the name to be one of its own while it builds.
        config: Any = decoder_of(model).config
        config._attn_implementation_internal = attn_implementation
        side = cls(model, examined, device=device, dtype=dtype)
        if parallel is not None:
            take_share(side, parallel)
        return side

    @classmethod
    def load_module(
        cls,
        path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        quantize: bool,
        parallel: TensorParallel | None,
    ) -> PreTrainedModel:
        """The class without its encoder, with this side's weights."""
        if parallel is None:
            return load_side(path, keep_decoder, device=device, dtype=dtype, quantize=quantize)
        config = cls.read_config(path)
        geometry = cls.geometry_of(config)
        return load_rank(path, config, geometry, parallel, device=device, dtype=dtype, quantize=quantize)

    @classmethod
    def without_weights(cls, path: Path, *, dtype: torch.dtype) -> Self:
        config = cls.read_config(path)
        examined = examine(config, capture_class=cls.capture_class)
        return cls(empty_model(config), examined, device=torch.device("meta"), dtype=dtype)

    @classmethod
    def read_config(cls, path: Path) -> PreTrainedConfig:
        return load_config(path)

    @classmethod
    def geometry_of(cls, config: PreTrainedConfig) -> DecoderGeometry:
        return examine(config, capture_class=cls.capture_class).geometry

    def fuse(self) -> None:
        """Merges projections, fuses norms; and layers, where the text model follows Llama's pattern."""
        super().fuse()
        decoder, geometry = self._decoder, self.geometry
        if geometry.states or self.takes_inputs:
            logger.info("the decoder's layers are transformers' own: they take more than hidden states")
            return
        sizes = {"hidden_size": geometry.hidden_size, "position_rows": geometry.position_rows}

        def check(layers: Sequence[FusedDecoderLayer]) -> None:
            levels = geometry.deepstack_levels
            check_text_model(decoder, layers, self._own_forward, levels=levels, **sizes)

        if not fuse_layers(getattr(decoder, "layers", nn.ModuleList()), check):
            self._fused = FusedTextModel(decoder, **sizes)

    def placeholder(self, plan: ItemPlan) -> list[int]:
        layout = self.layout_of(plan)
        rows = sum(token in self.row_token_ids for token in layout.tokens)
        if len(layout.tokens) != plan.length or rows != plan.rows:
            raise InvalidRequest(
                f"item {plan.mm_hash} has {plan.rows} rows for {rows} placeholder tokens of {plan.length}",
                param="plan",
            )
        return list(layout.tokens)

    def text_around(self, plan: ItemPlan) -> tuple[Sequence[int], Sequence[int]]:
        layout = self.layout_of(plan)
        return layout.head, layout.tail

    def continues(self, plan: ItemPlan) -> bool:
        return plan.modality == "video" and bool(plan.layout) and ItemLayout.decode(plan.layout).continues

    def layout_of(self, plan: ItemPlan) -> ItemLayout:
        """What the prompt needs of an item; InvalidRequest for what is none of this model's."""
        layout = ItemLayout.decode(plan.layout) if plan.layout else self._run_of(plan)
        names, width = self.capture.grid_names, len(self.capture.type_names)
        if any(index >= len(names) for index in layout.grids) or any(len(t) != width for t in layout.types):
            raise InvalidRequest("an item's layout is not one of this model's", param="items")
        if layout.tokens and max(layout.tokens) > self.geometry.vocab_size:
            raise InvalidRequest("an item's placeholder has tokens that the model lacks", param="items")
        return layout

    def _run_of(self, plan: ItemPlan) -> ItemLayout:
        """The layout of a plan without one, as overrides send it: a run of the image token, and its grid."""
        grids, grid = {}, plan.grid_thw
        if _GRID in self.capture.grid_names:
            merge = int(self.config.vision_config.spatial_merge_size)
            if len(grid) != 3 or min(grid) < 1 or grid[1] % merge or grid[2] % merge:
                raise InvalidRequest(
                    f"item {plan.mm_hash} has an impossible grid {tuple(grid)}", param="plan"
                )
            # Before anything of its size is made: a forged grid may be of any.
            if plan.rows != (rows := math.prod(grid) // merge**2):
                raise InvalidRequest(
                    f"item {plan.mm_hash} has {plan.rows} rows, but its grid {tuple(grid)} takes {rows}",
                    param="plan",
                )
            grids = {self.capture.grid_names.index(_GRID): torch.tensor([grid])}
        token, types = self.token_ids[self.modality], (1,) * len(self.capture.type_names)
        return ItemLayout((token,) * plan.rows, (types,) * plan.rows, grids)

    def positions(self, token_ids: Sequence[int], features: Sequence[MMFeature]) -> tuple[torch.Tensor, int]:
        given = self.prompt_inputs(token_ids, features)
        return given.positions, given.delta

    def prompt_inputs(self, token_ids: Sequence[int], features: Sequence[MMFeature]) -> PromptInputs:
        if self._one_item and sum(not self.continues(feature.plan) for feature in features) > 1:
            raise InvalidRequest(
                "this model's embeddings of a picture depend on how many the prompt has: send one",
                param="messages",
            )
        count = len(token_ids)
        if self._plain:
            return PromptInputs(torch.arange(count)[None], 0)
        if self.counts_text and not features and self._marks.isdisjoint(token_ids):
            return PromptInputs(torch.arange(count).expand(self.geometry.position_rows, -1).contiguous(), 0)
        prompt = self._captured(token_ids, sorted(features, key=lambda feature: feature.placement.offset))
        own = torch.arange(count)[None] if prompt.positions is None else prompt.positions.long()
        if prompt.positions is not None and not torch.equal(own, prompt.positions):
            raise InvalidRequest(
                "at this rate a video's frames have positions between whole numbers: give another fps",
                param="mm_processor_kwargs.fps",
            )
        positions = own.expand(self.geometry.position_rows, -1).contiguous()
        # A video's last frames may lie behind the text after it; in `generate`, too, text goes on.
        delta = int(positions[:, -1].max()) + 1 - count
        return PromptInputs(positions, delta, prompt.spans, prompt.inputs)

    def _captured(self, token_ids: Sequence[int], features: Sequence[MMFeature]) -> CapturedPrompt:
        types = torch.zeros(len(self.capture.type_names), len(token_ids), dtype=torch.int64)
        grids: dict[str, list[torch.Tensor]] = {}
        expected = torch.full((len(token_ids),), -1)
        layouts = [self.layout_of(feature.plan) for feature in features]
        groups = [self._group(layout) for layout in layouts]
        rows: dict[str, list[int]] = {self.capture.modality: []}
        for feature, layout, group in zip(features, layouts, groups, strict=True):
            counts = rows.setdefault(group, [])
            if layout.continues and counts:
                counts[-1] += feature.plan.rows
            else:
                counts.append(feature.plan.rows)
        starts = accumulate(map(sum, rows.values()), initial=0)
        row = dict(zip(rows, starts, strict=False))
        for feature, layout, group in zip(features, layouts, groups, strict=True):
            place = feature.placement
            if types.shape[0]:
                types[:, place.offset : place.end] = torch.tensor(layout.types).T
            for index, grid in layout.grids.items():
                grids.setdefault(self.capture.grid_names[index], []).append(grid)
            for first, length in place.runs or ((0, place.length),):
                at = place.offset + first
                expected[at : at + length] = torch.arange(row[group], row[group] + length)
                row[group] += length
        together = {name: torch.cat(parts) for name, parts in grids.items()}
        try:
            main = rows.pop(self.capture.modality)
            prompt = self.capture.run(token_ids, types, main, together, others=rows)
        except ConfigError:
            raise
        except Exception as error:  # of any kind: code of the class, which checks its prompt
            reason = reason_of(error)
            raise InvalidRequest(
                f"the model does not take this prompt: {reason}", param="messages"
            ) from error
        if not torch.equal(prompt.rows, expected):
            raise InvalidRequest("the model puts the items' rows elsewhere than planned", param="messages")
        return prompt

    def _group(self, layout: ItemLayout) -> str:
        """The modality whose getter gives the item's rows: that of the token under which it has them."""
        main = self.capture.modality
        others = {token: each for each, token in self.token_ids.items() if token != self.token_ids[main]}
        return next((others[token] for token in layout.tokens if token in others), main)

    def generated_inputs(self, token_ids: Sequence[int]) -> Mapping[str, torch.Tensor]:
        if not self.takes_inputs:
            return {}
        types = torch.zeros(len(self.capture.type_names), len(token_ids), dtype=torch.int64)
        return self.capture.run(token_ids, types, generated=True).inputs

    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        for token, embedded in self._embedded.items():
            token_ids = torch.where(token_ids == token, torch.full_like(token_ids, embedded), token_ids)
        rows: torch.Tensor = self._embedding(token_ids)
        return rows

    @torch.no_grad()
    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        merged: MergedEmbeds | None,
        attention: object,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        merged = in_batch_order(merged, embeds) if merged is not None and merged.index.numel() else None
        run = self._own_forward if self._fused is None else self._fused
        return run(embeds, positions, merged, attention, **inputs)

    def _own_forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        merged: MergedEmbeds | None,
        attention: object,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        """By the class's own text model; `merged` are in the batch's order."""
        states, tokens = getattr(attention, "states", None), len(embeds)
        # Recurrent layers go along the sequence: tokens of several sequences are a batch of one each.
        shape = (1, tokens) if states is None or states.num_sequences == 1 else (tokens, 1)
        in_rows = (-1, *shape) if self.geometry.position_rows > 1 else shape
        given: dict[str, Any] = {name: x.view(*shape, *x.shape[1:]) for name, x in inputs.items()}
        if states is not None:
            given[self._cache] = states
        if merged is not None:
            first, *levels = merged.rows.split(self.geometry.hidden_size, dim=1)
            embeds = embeds.index_copy(0, merged.index, first)
            if levels:
                mask = torch.zeros(tokens, dtype=torch.bool, device=embeds.device)
                mask[merged.index] = True
                given |= {"visual_pos_masks": mask.view(shape), "deepstack_visual_embeds": levels}
        out = self._decoder(
            inputs_embeds=embeds.view(*shape, -1),
            position_ids=positions.view(in_rows),
            use_cache=False,
            attn_metadata=attention,
            **given,
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden.reshape(tokens, -1)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self._head(hidden)
        return scores

    @cached_property
    def _head(self) -> Head:
        return outer_head(self.module, self.geometry.hidden_size)


def in_batch_order(merged: MergedEmbeds, embeds: torch.Tensor) -> MergedEmbeds:
    """Rows by ascending batch index, as a boolean mask enumerates them, on the batch's device and dtype."""
    index, order = merged.index.to(embeds.device).sort()
    return MergedEmbeds(index=index, rows=merged.rows.to(embeds.device, embeds.dtype)[order])
