"""The encoder side of any class: its own feature getter, in batches where items can be joined."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionAttention

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.machine.device import host_empty
from triptych.base.types import SEGMENT, JsonObject, Options, runs_of
from triptych.base.vllm_classes import GRIDS
from triptych.models.audio import AudioFile, Silence
from triptych.models.base import APART, EncoderSide, Media, PreparedItem
from triptych.models.checkpoint.config import load_config
from triptych.models.families.fixed_size import FixedSizeEncoder
from triptych.models.families.segments import SegmentAttention
from triptych.models.generic.capture import LENGTHS, PromptCapture, modality_tokens
from triptych.models.generic.examine import Examined, examine
from triptych.models.generic.layout import ItemLayout
from triptych.models.generic.processor import GenericProcessor, ProcessedItem, processor_settings
from triptych.models.generic.segments import ClipOutline, measured_extra_rows
from triptych.models.generic.sides import (
    MODALITIES,
    base_of,
    class_of,
    empty_model,
    keep_encoder,
    load_side,
    modality_of,
)
from triptych.models.images import check_rows
from triptych.models.video.clip import Clip, ClipInfo, SegmentEnds
from triptych.models.weights.loading import KeyMap

logger = logging.getLogger(__name__)

#: Width and height of pictures: small, wide, tall, large.
_FORMS = ((64, 64), (300, 90), (60, 200), (900, 700))


class GenericEncoder(EncoderSide):
    """A class without its decoder. A row is a feature, and then one column block per deepstack level."""

    capture_class: ClassVar[type[PromptCapture]] = PromptCapture
    _processor: GenericProcessor
    _examined: Examined

    def __init__(
        self,
        module: PreTrainedModel,
        hidden_size: int,
        levels: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config: Any = module.config
        self.module = module
        speed_up(module)
        self.row_token_ids = self.capture_class.row_tokens(self.config)
        patch = getattr(getattr(self.config, "vision_config", None), "patch_size", None)
        self._patch = patch if isinstance(patch, int) else 14
        self.device = device
        self.dtype = dtype
        self.levels = levels
        self.width = hidden_size * (1 + levels)
        self.modality = modality_of(module)  # type: ignore[misc]
        base = base_of(module)
        getters: dict[str, Any] = {each: getattr(base, f"get_{each}_features", None) for each in MODALITIES}
        self._getter: Any = getters[self.modality]
        self._names = inspect.signature(self._getter).parameters
        #: The getters of other items, and what they take.
        self._apart = {
            each: (getter, inspect.signature(getter).parameters) for each, getter in getters.items() if getter
        }

    @classmethod
    def load(
        cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False
    ) -> GenericEncoder:
        # Before the weights: what is wrong with the folder is said at once.
        empty = cls.without_weights(path)
        cls._check_rows(path, empty)
        module = load_side(path, keep_encoder, device=device, dtype=dtype, quantize=quantize)
        side = cls._of(module, empty._examined, device, dtype)
        side._processor = empty._processor
        if cls is not GenericEncoder or side.modality == "audio" or not has_fixed_size(side):
            return side
        fixed = FixedSizeImages.__new__(FixedSizeImages)
        fixed.__dict__.update(side.__dict__)
        return fixed

    @classmethod
    def without_weights(cls, path: Path) -> Self:
        """The side that prepares items, on meta."""
        config = load_config(path)
        examined = examine(config, capture_class=cls.capture_class)
        processor = GenericProcessor(path, modality_tokens(config), examined.type_names)
        empty = empty_model(config)
        keep_encoder(empty)
        side = cls._of(empty, examined, torch.device("meta"), torch.float32)
        side._processor = processor
        return side

    @classmethod
    def without_processor(
        cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False
    ) -> Self:
        """The tower alone, for items that are prepared elsewhere."""
        examined = examine(load_config(path), capture_class=cls.capture_class)
        module = load_side(path, keep_encoder, device=device, dtype=dtype, quantize=quantize)
        return cls._of(module, examined, device, dtype)

    @classmethod
    def _of(
        cls, module: PreTrainedModel, examined: Examined, device: torch.device, dtype: torch.dtype
    ) -> Self:
        geometry = examined.geometry
        side = cls(module, geometry.hidden_size, geometry.deepstack_levels, device=device, dtype=dtype)
        side._examined = examined
        return side

    @staticmethod
    def _check_rows(path: Path, empty: GenericEncoder) -> None:
        """ConfigError where the tower, on meta, makes more or fewer rows of a picture than the processor
        writes placeholders. A tower that reads values has its rows compared when it warms up."""
        try:
            item = empty.preprocess(empty.sample(), {})
            rows = len(empty.encode_item(item))
        except Exception:  # of any kind: code of the class, without values
            return
        try:
            check_rows(item.rows, rows)
        except InvalidRequest as error:
            raise ConfigError(f"MODEL={path}: {error.message}") from error

    @classmethod
    def processor_config(cls, path: Path) -> JsonObject:
        return processor_settings(path)

    @classmethod
    def has_known_keys(cls, path: Path, keys: KeyMap) -> bool:
        """Not of a class whose encoder has modules with names of decoders', such as token embeddings."""
        model = empty_model(load_config(path))
        keep_encoder(model)
        names = set(model.state_dict())
        return len(keys.encoder_names(names)) == len(names)

    @classmethod
    def modality_of(cls, path: Path) -> str:
        return modality_of(class_of(load_config(path)))

    def sample(self) -> Media:
        return Silence() if self.modality == "audio" else super().sample()

    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        if self.modality == "audio":
            return self.preprocess_sound(media, options)
        return self._prepared(self._processor(media, options), "image")

    def preprocess_sound(self, audio: AudioFile, options: Options) -> PreparedItem:
        if why := self._examined.silence:
            raise InvalidRequest(f"audio: this model takes no sound ({why}): send text", param="audio")
        return self._prepared(self._processor.sound(audio, options), "audio")

    def preprocess_video(self, clip: Clip, options: Options) -> PreparedItem:
        if SEGMENT in options:
            return self._preprocess_segment(clip, dict(options))
        return self._prepared(self._processor.video(clip, options), "video")

    def _preprocess_segment(self, clip: Clip, options: dict[str, Any]) -> PreparedItem:
        """Some frames of a video, at the size and with the placeholder that they have in it."""
        given = options.pop(SEGMENT)
        if not isinstance(given, list) or len(given) != 3 or not all(isinstance(each, int) for each in given):
            raise InvalidRequest(f"video: {SEGMENT} must be three numbers", param="video")
        start, end, extra_rows = given
        outline = self._outline(clip.info, options, extra_rows)
        segment = outline.segment(start, end)
        pixels = self._processor.video(clip, segment.options, slice(start, end))
        cut = replace(outline.cut(segment, grids=False), tensors=pixels.tensors)
        layout = self._layout(outline.cut(segment, grids=start == 0))
        encoded = replace(layout, continues=start > 0).encode()
        return replace(self._prepared(cut, "video"), layout=encoded, extra_rows=segment.extra_rows)

    def _outline(self, info: ClipInfo, options: Options, extra_rows: int) -> ClipOutline:
        return ClipOutline(self._processor, info, options, extra_rows, self.row_token_ids)

    def extra_video_rows(self) -> int | None:
        return self._extra_video_rows

    @cached_property
    def _extra_video_rows(self) -> int | None:
        with torch.inference_mode():
            return measured_extra_rows(self.preprocess_video, lambda item: self.encode([item])[0])

    def video_segments(self, info: ClipInfo, options: Options, frames: int, extra_rows: int) -> SegmentEnds:
        try:
            return self._outline(info, options, extra_rows).ends(frames)
        except InvalidRequest as error:
            logger.info("a video is one item: %s", error)
            return []

    def _prepared(self, item: ProcessedItem, modality: str) -> PreparedItem:
        apart = next((APART[name] for name in item.tensors if name in APART), self.modality)
        _, names = self._apart[apart]
        mask = [token in self.row_token_ids for token in item.tokens]
        grid = next((item.tensors[name] for name in GRIDS if name in item.tensors), None)
        tensors = {name: tensor for name, tensor in item.tensors.items() if name in names}
        if LENGTHS in self._examined.grid_names and LENGTHS in tensors:
            # These classes take the frames of the mask only, and pad each file to minutes.
            frames = int(tensors[LENGTHS].sum())
            tensors = {name: x[..., :frames].clone() for name, x in tensors.items()}
        frames = round(100 * item.seconds)
        # As of Whisper: a first frame of 10 ms, the frames from there on, those of the file.
        times = (0, frames, frames) if frames else ()
        pixels = max((tensor.numel() for tensor in tensors.values()), default=0)
        return PreparedItem(
            rows=sum(mask),
            length=len(item.tokens),
            grid_thw=times if grid is None else tuple(grid[0].tolist()),
            cost=sum(mask) if apart == "audio" else max(1, pixels // (3 * self._patch**2)),
            tensors=tensors,
            runs=runs_of(mask),
            layout=self._layout(item).encode(),
            modality=modality,
        )

    def _layout(self, item: ProcessedItem) -> ItemLayout:
        known = self._examined.grid_names
        grids = {index: item.tensors[name] for index, name in enumerate(known) if name in item.tensors}
        if LENGTHS in known and LENGTHS in item.tensors:
            grids[known.index(LENGTHS)] = item.tensors[LENGTHS].sum(-1)
        return ItemLayout(item.tokens, item.types, grids, item.head, item.tail)

    @torch.no_grad()
    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        if type(self).encode_item is not GenericEncoder.encode_item:
            return [self.encode_item(item) for item in items]
        key = self._key
        return [rows for _, batch in groupby(items, key) for rows in self._encoded(list(batch))]

    def encode_item(self, item: PreparedItem) -> torch.Tensor:
        """An item's rows, one for each row token of its placeholder; an adapter may have its own."""
        return self._encoded([item])[0]

    def _key(self, item: PreparedItem) -> object:
        """Items of another getter are encoded one by one."""
        return id(item) if item.apart else self._batch_key(item)

    def _batch_key(self, item: PreparedItem) -> object:
        """Items of equal keys, one behind the other, are encoded by one call of the getter.

        Those are patches of pictures that grids tell apart, or pictures (or tiles) of one size.
        """
        given = {name: x for name, x in item.tensors.items() if name in self._names}
        names, pixels = set(given), given.get("pixel_values")
        alike = names == {"pixel_values"} and pixels is not None and pixels.dim() == 4
        if not alike and names != {"pixel_values", "image_grid_thw"}:
            return id(item)
        return tuple((name, x.dtype, x.shape[1:]) for name, x in sorted(given.items()))

    def _encoded(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        if apart := items[0].apart:
            getter, names = self._apart[apart]
            moved = {name: self._moved(x) for name, x in items[0].tensors.items() if name in names}
            columns = self.columns(getter(**moved, return_dict=True))
            if missing := self.width - sum(column.shape[-1] for column in columns):
                # Sound has no deepstack levels: zeros are added there.
                columns.append(columns[0].new_zeros(len(columns[0]), missing))
            extra = items[0].extra_rows
            return [self._joined([column[: len(column) - extra] for column in columns])]
        columns = self.columns(self._getter(**self.inputs(items), return_dict=True))
        if len(items) == 1:
            return [self._joined(columns)]
        counts = [item.rows for item in items]
        parts = zip(*(column.split(counts) for column in columns), strict=True)
        return [self._joined(levels) for levels in parts]

    def inputs(self, items: Sequence[PreparedItem]) -> dict[str, torch.Tensor]:
        """What the getter takes of these items, on the tower's device and in its dtype."""
        names = [name for name in items[0].tensors if name in self._names]
        return {name: self._moved(torch.cat([item.tensors[name] for item in items])) for name in names}

    def columns(self, out: Any) -> list[torch.Tensor]:
        """The column blocks of all rows, [rows, hidden_size] each, of a getter's output."""
        first = getattr(out, "pooler_output", None)
        if first is None:
            # Llama 4's forward projects what its getter gives, Fuyu's takes it as it is.
            project = getattr(base_of(self.module), "multi_modal_projector", nn.Identity())
            first = project(out.last_hidden_state)
        if (valid := getattr(out, "attention_mask", None)) is not None and valid.shape == first.shape[:2]:
            first = first[valid]
        return [_flat(part) for part in (first, *(getattr(out, "deepstack_features", None) or ()))]

    def _joined(self, levels: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
        """A copy even of a single level: an item must not keep more than its rows alive."""
        if self.device.type != "cpu":
            return torch.cat(levels, dim=-1)
        shape = (len(levels[0]), sum(level.shape[-1] for level in levels))
        return torch.cat(levels, dim=-1, out=host_empty(shape, levels[0].dtype))

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)


class FixedSizeImages(GenericEncoder, FixedSizeEncoder):
    """A class whose processor makes one tensor of one size of every picture: it has encoder graphs, too.

    A request's options may cut a picture into several of that size.
    """

    input_name: ClassVar[str] = "pixel_values"

    @cached_property
    def _example(self) -> PreparedItem:
        return self.preprocess(self.sample(), {})

    @property
    def rows_per_item(self) -> int:
        return self._example.rows

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self._example.tensors[self.input_name].shape[1:])

    def _inputs(self, items: Sequence[PreparedItem]) -> torch.Tensor:
        inputs = torch.cat([item.tensors[self.input_name] for item in items])
        if len(inputs) * self.rows_per_item != sum(item.rows for item in items):
            raise ValueError(f"{len(inputs)} pictures of {self.rows_per_item} rows are not the items' rows")
        return inputs

    def compute(self, inputs: torch.Tensor) -> torch.Tensor:
        columns = self.columns(self._getter(pixel_values=inputs, return_dict=True))
        return torch.cat(columns, dim=-1).view(len(inputs), self.rows_per_item, -1)


def has_fixed_size(side: GenericEncoder) -> bool:
    """Whether pictures of every form become one tensor of one size, and as many rows."""
    try:
        items = [side.preprocess(Image.new("RGB", size, "grey"), {}) for size in _FORMS]
    except InvalidRequest:
        return False
    made = {(item.rows, *((name, x.shape) for name, x in item.tensors.items())) for item in items}
    pixels = items[0].tensors.get("pixel_values")
    alone = len(made) == len(items[0].tensors) == 1
    return alone and pixels is not None and pixels.dim() == 4 and len(pixels) == 1


def _flat(features: Any) -> torch.Tensor:
    """[rows, width] of a tensor, or of a list of them, of any number of dimensions."""
    if isinstance(features, list | tuple):
        return torch.cat([_flat(part) for part in features])
    flat: torch.Tensor = features.reshape(-1, features.shape[-1])
    return flat


class _OnePatch:
    """A convolution that computes inputs of one patch each as one matrix product, several times as fast."""

    kernel_size: Any
    weight: Any
    bias: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[2:] != self.kernel_size:
            rows: torch.Tensor = super().forward(x)  # type: ignore[misc]
            return rows
        rows = functional.linear(x.flatten(1), self.weight.flatten(1), self.bias)
        return rows.view(*rows.shape, *(1 for _ in self.kernel_size))


class PatchConv2d(_OnePatch, nn.Conv2d):
    """For patches [count, channels, height, width]."""


class PatchConv3d(_OnePatch, nn.Conv3d):
    """For patches [count, channels, frames, height, width]."""


_CONVOLUTIONS = {nn.Conv2d: PatchConv2d, nn.Conv3d: PatchConv3d}


def speed_up(module: nn.Module) -> None:
    """Replaces, in place, what has a faster module; parameters and their names stay."""
    for part in list(module.modules()):
        if type(part) in _CONVOLUTIONS and not any(part.padding) and part.groups == 1:  # type: ignore[arg-type]
            part.__class__ = _CONVOLUTIONS[type(part)]  # type: ignore[index]
        for name, child in part.named_children():
            kind: Any = type(child)
            if hasattr(child, "qkv") and attends_in_segments(kind):
                setattr(part, name, SegmentAttention(child))


@functools.cache
def attends_in_segments(attention: Any) -> bool:
    """Whether transformers computes this attention by the same code as that of Qwen3-VL's tower."""
    return _code(attention) == _code(Qwen3VLVisionAttention)


def _code(attention: Any) -> list[str]:
    module = vars(sys.modules[attention.__module__])
    helpers = [module.get(name) for name in ("apply_rotary_pos_emb_vision", "rotate_half")]
    return [inspect.getsource(part) for part in (attention.forward, *helpers) if part is not None]
