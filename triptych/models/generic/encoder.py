"""The encoder side of any class: its own feature getter, item by item."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject, Options, runs_of
from triptych.models.base import EncoderSide, Media, PreparedItem
from triptych.models.families.text import load_config
from triptych.models.generic.capture import PromptCapture
from triptych.models.generic.examine import Examined, examine
from triptych.models.generic.layout import ItemLayout
from triptych.models.generic.processor import GenericProcessor, processor_settings
from triptych.models.generic.sides import base_of, keep_encoder, load_side


class GenericEncoder(EncoderSide):
    """A class without its decoder. A row is a feature, and then one column block per deepstack level."""

    #: Classes may read a layer's weight themselves.
    plain_linears: ClassVar[bool] = False
    capture_class: ClassVar[type[PromptCapture]] = PromptCapture

    def __init__(
        self,
        module: PreTrainedModel,
        examined: Examined,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.module = module
        self._processor: GenericProcessor | None = None
        self._examined = examined
        self.row_token_ids = self.capture_class.row_tokens(module.config)
        patch = getattr(getattr(module.config, "vision_config", None), "patch_size", None)
        self._patch = patch if isinstance(patch, int) else 14
        self.device = device
        self.dtype = dtype
        self.levels = examined.geometry.deepstack_levels
        self.width = examined.geometry.hidden_size * (1 + self.levels)
        self._getter: Any = base_of(module).get_image_features
        self._names = inspect.signature(self._getter).parameters

    @classmethod
    def load(cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False) -> Self:
        if quantize:
            raise ConfigError(f"MODEL={path} cannot be quantized while loading: leave out --quantization")
        side = cls.without_processor(path, device=device, dtype=dtype)
        side._processor = GenericProcessor(path, load_config(path).image_token_id, side._examined.type_names)
        return side

    @classmethod
    def without_processor(cls, path: Path, *, device: torch.device, dtype: torch.dtype) -> Self:
        """The tower alone, for items that are prepared elsewhere."""
        examined = examine(load_config(path), capture_class=cls.capture_class)
        return cls(
            load_side(path, keep_encoder, device=device, dtype=dtype), examined, device=device, dtype=dtype
        )

    @classmethod
    def processor_config(cls, path: Path) -> JsonObject:
        return processor_settings(path)

    def fuse(self) -> None:
        """Nothing: what may be fused depends on the class."""

    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        assert self._processor is not None
        image = self._processor(media, options)
        mask = [token in self.row_token_ids for token in image.tokens]
        names = self._examined.grid_names
        grids = {index: image.tensors[name] for index, name in enumerate(names) if name in image.tensors}
        layout = ItemLayout(image.tokens, image.types, grids, image.head, image.tail)
        grid = image.tensors.get("image_grid_thw")
        tensors = {name: tensor for name, tensor in image.tensors.items() if name in self._names}
        pixels = max((tensor.numel() for tensor in tensors.values()), default=0)
        return PreparedItem(
            rows=sum(mask),
            length=len(image.tokens),
            grid_thw=() if grid is None else tuple(grid[0].tolist()),
            cost=max(1, pixels // (3 * self._patch**2)),
            tensors=tensors,
            runs=runs_of(mask),
            layout=layout.encode(),
        )

    @torch.no_grad()
    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        return [self.encode_item(item) for item in items]

    def encode_item(self, item: PreparedItem) -> torch.Tensor:
        """An item's rows, one for each of its placeholder's row tokens."""
        tensors = {name: self._moved(x) for name, x in item.tensors.items() if name in self._names}
        out = self._getter(**tensors, return_dict=True)
        first = getattr(out, "pooler_output", None)
        if first is None:
            # Llama 4's forward projects what its getter gives, Fuyu's takes it as it is.
            project = getattr(base_of(self.module), "multi_modal_projector", nn.Identity())
            first = project(out.last_hidden_state)
        levels = getattr(out, "deepstack_features", None) or ()
        columns = [_flat(part) for part in (first, *levels)]
        # cat copies, even a single column: the item must not keep more than its rows alive.
        return torch.cat(columns, dim=-1) if len(columns) > 1 else columns[0].clone()

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)


def _flat(features: Any) -> torch.Tensor:
    """[rows, width] of a tensor, or of a list of them, of any number of dimensions."""
    if isinstance(features, list | tuple):
        return torch.cat([_flat(part) for part in features])
    flat: torch.Tensor = features.reshape(-1, features.shape[-1])
    return flat
