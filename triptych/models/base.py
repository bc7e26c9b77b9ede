"""The interface of a model family: an encoder side, in encoder workers, and a decoder side, in PD workers.

A family is one file with two classes and its row in `registry.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from PIL import Image

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.machine.device import Device
from triptych.base.types import GREEDY, ItemPlan, JsonObject, MMFeature, Options, SamplingParams
from triptych.models.audio import AudioFile
from triptych.models.fused.layers import fuse_norms
from triptych.models.fused.merged import merge
from triptych.models.geometry import CrossGeometry, DecoderGeometry, LayerRule, row_width
from triptych.models.images import ImageProcessor
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.video.clip import Clip, ClipInfo, SegmentEnds

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from triptych.models.weights.loading import KeyMap

#: Media that a class takes by a getter of their own, beside that of pictures, and their modalities.
APART = {"pixel_values_videos": "video", "input_features": "audio", "input_values": "audio"}
#: Media as a family's `preprocess` takes them: an RGB picture, an `AudioFile`, or the bytes of a text.
Media = Any


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """The tower's inputs of an item, and the size of its output; `cost` is in patches of a batch's budget."""

    rows: int
    length: int
    grid_thw: tuple[int, ...]
    cost: int
    tensors: dict[str, torch.Tensor]
    runs: tuple[tuple[int, int], ...] | None = None
    layout: tuple[int, ...] = ()
    #: Where it is not that of the encoder side.
    modality: str = ""
    #: Rows that the tower makes behind the item's and that are dropped.
    extra_rows: int = 0

    @property
    def apart(self) -> str:
        """The modality of the getter that takes it; empty where that is the encoder side's first."""
        return next((modality for name, modality in APART.items() if name in self.tensors), "")

    @property
    def nbytes(self) -> int:
        """Host bytes of the prepared tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class EncoderSide(ABC):
    """Tower and projector of one checkpoint on one device."""

    modality: ClassVar[str] = "image"
    #: Elements of one output row (hidden size times 1 + deepstack levels).
    width: int
    #: dtype of the tower and of the rows it puts out.
    dtype: torch.dtype
    device: torch.device
    #: The modules that hold the parameters, by checkpoint-side name; for reports and tests.
    module: torch.nn.Module

    @classmethod
    @abstractmethod
    def load(
        cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False
    ) -> EncoderSide:
        """Loads only this side's tensors; nothing missing, nothing left on meta, else ConfigError.

        With `quantize` its linear layers are held in 8 bits.
        """

    @classmethod
    def processor_config(cls, path: Path) -> JsonObject:
        """The settings that decide the tower's input: part of the namespace. ConfigError without them."""
        return ImageProcessor(path).config

    @classmethod
    def has_known_keys(cls, path: Path, keys: KeyMap) -> bool:
        """Whether `keys` name all of the checkpoint's tensors on which rows depend."""
        return True

    def fuse(self) -> None:
        """Fuses layers of the loaded module where the results stay the same."""
        # Not projections: with a picture's hundreds of rows one product costs more than three.
        fuse_norms(self.module)

    @abstractmethod
    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        """The item as the checkpoint's own processor prepares it, `options` being mm_processor_kwargs.

        InvalidRequest, naming the option, for what the processor does not know or the media cannot be.
        """

    def preprocess_video(self, clip: Clip, options: Options) -> PreparedItem:
        """As `preprocess`, of a video or of a segment of it; InvalidRequest where the model takes none."""
        raise InvalidRequest("video: this model takes no videos: send pictures", param="video")

    def preprocess_sound(self, audio: AudioFile, options: Options) -> PreparedItem:
        """A sound of a prompt with pictures, as `preprocess_video`."""
        raise InvalidRequest("audio: this model takes no sound: send text", param="audio")

    @classmethod
    def modality_of(cls, path: Path) -> str:
        """The modality of a checkpoint's items, or of the first kind where they have several."""
        return cls.modality

    def extra_video_rows(self) -> int | None:
        """Rows that the tower adds behind those of a video's frames; None where a video is one item.

        Computes: to be called in the tower's thread.
        """
        return None

    def video_segments(self, info: ClipInfo, options: Options, frames: int, extra_rows: int) -> SegmentEnds:
        """Where the segments of a video end, `frames` sampled frames each; empty: it is one item."""
        return []

    def sample(self) -> Media:
        """A small input of `preprocess`, to warm the tower up."""
        return Image.new("RGB", (64, 64), "grey")

    @abstractmethod
    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """One [rows, width] tensor per item, contiguous, each with storage of its own."""


@dataclass(frozen=True, slots=True)
class PromptDefaults:
    """The decoder prompt of a request without one: its start token, and all of its tokens."""

    start: int
    token_ids: tuple[int, ...]

    def prepend_start(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """`token_ids` behind the start token, unless they begin with it."""
        given = tuple(token_ids)
        return given if given[:1] == (self.start,) else (self.start, *given)


class LogitsRule(Protocol):
    """A rule that forbids or forces tokens at one position; keeps no state between calls."""

    def apply(self, logits: torch.Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Changes the float32 `logits` [vocab_size] of the token after `output_ids` in place.

        `output_ids` are all output tokens so far, those of earlier attempts included.
        """
        ...


class Forbids:
    """A logits rule that only forbids tokens, so that it can be applied to many rows at once."""

    __slots__ = ()

    def forbidden(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[int]:
        """Ids that may not come next; those beyond the vocabulary do not count."""
        raise NotImplementedError

    def apply(self, logits: torch.Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        logits.index_fill_(0, known_ids(self.forbidden(prompt_ids, output_ids), logits), float("-inf"))


def known_ids(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Those within the vocabulary, on the device of `logits`: checkpoints list tokens that others have."""
    ids = torch.tensor([token for token in token_ids if 0 <= token < len(logits)], dtype=torch.int64)
    return Device.of(logits.device).upload(ids)


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """What one prompt gives the decoder beside its tokens and rows.

    `positions` [position_rows, T] are int64 on CPU; a token generated at index i has position i + `delta` in
    every row. The tokens of a span [start, end) attend to one another, so that no chunk ends inside it.
    `inputs` are further inputs of the decoder, [T, ...] each.
    """

    positions: torch.Tensor
    delta: int
    spans: tuple[tuple[int, int], ...] = ()
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MergedEmbeds:
    """The encoder rows of this batch: `index` [N] are batch token indices, `rows` [N, width]."""

    index: torch.Tensor
    rows: torch.Tensor


@dataclass(slots=True)
class GenerationDefaults:
    """The defaults of a request's sampling, by the checkpoint's generation_config.

    Of `sampling` those that are DEFAULTED count. Without `do_sample` it is greedy: temperature 0, no cuts.
    Its repetition penalty counts all the same.
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling: SamplingParams = GREEDY
    max_tokens: int | None = None
    extra: JsonObject = field(default_factory=dict)


class DecoderSide(ABC):
    """Text model and head of one checkpoint on one device; never handles media."""

    geometry: DecoderGeometry
    dtype: torch.dtype
    device: torch.device
    module: torch.nn.Module
    #: The token that a chat template puts once per image, and that the placeholder repeats.
    image_token_id: int | None
    #: The placeholder's token of each modality, where the class's config names them.
    token_ids: Mapping[str, int] = MappingProxyType({})
    #: Ids that stand for a row each, where the chat template may write another token for an image.
    row_token_ids: frozenset[int] = frozenset()
    #: The modality of the model's items: "image", "audio" or "text".
    modality: ClassVar[str] = "image"
    #: Set by encoder-decoder models; their attention modules towards the encoder carry `is_cross = True`.
    cross: CrossGeometry | None = None
    #: What the model's own attention adds to its scores; None for most.
    bias: torch.Tensor | None = None
    #: The tokens that each layer reaches; empty: as its attention function is called.
    layer_rules: Sequence[LayerRule] = ()
    #: Whether the decoder takes inputs of each token beside its embedding and position.
    takes_inputs: bool = False

    @classmethod
    @abstractmethod
    def read_config(cls, path: Path) -> PreTrainedConfig:
        """The checkpoint's config; ConfigError for one that the family does not serve."""

    @classmethod
    @abstractmethod
    def geometry_of(cls, config: PreTrainedConfig) -> DecoderGeometry:
        """The sizes of the decoder, undivided."""

    @classmethod
    def cross_of(cls, config: PreTrainedConfig) -> CrossGeometry | None:
        """The sizes of cross-attention, undivided; None for a decoder-only model."""
        return None

    @property
    def modalities(self) -> tuple[str, ...]:
        """Those that an item of a prompt may have."""
        return (self.modality,)

    @property
    def row_width(self) -> int:
        """Columns of an embedding's row, those of deepstack levels included."""
        return row_width(self.geometry, self.cross)

    @classmethod
    @abstractmethod
    def load(
        cls,
        path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attn_implementation: str,
        quantize: bool = False,
        parallel: TensorParallel | None = None,
    ) -> DecoderSide:
        """Loads only this side's tensors, as the encoder side does; `quantize` leaves out the head.

        `attn_implementation` is a name registered with transformers' AttentionInterface. With `parallel` only
        this rank's share is loaded: `geometry` and `cross` count its heads, and all ranks call `forward` and
        `logits` in the same order, with the same batch. ConfigError for heads that cannot be divided so.
        """

    @classmethod
    def without_weights(cls, path: Path, *, dtype: torch.dtype) -> DecoderSide:
        """The decoder without its weights: it places items and checks requests, another engine computes.

        ConfigError for a family that no other engine computes.
        """
        raise ConfigError(f"MODEL={path} is of a family that only --engine native computes")

    def fuse(self) -> None:
        """Fuses layers of the loaded module where the results stay the same."""
        merge(self.module)
        fuse_norms(self.module)

    @abstractmethod
    def placeholder(self, plan: ItemPlan) -> list[int]:
        """The `plan.length` tokens that stand for the item, in place of the template's one image token.

        InvalidRequest when the plan's rows do not fit its grid.
        """

    def text_around(self, plan: ItemPlan) -> tuple[Sequence[int], Sequence[int]]:
        """Ordinary tokens before and after the placeholder, which are tokenised with the text beside them."""
        return (), ()

    def continues(self, plan: ItemPlan) -> bool:
        """Whether the item is a segment of the video that the item before it is of."""
        return False

    @abstractmethod
    def positions(self, token_ids: Sequence[int], features: Sequence[MMFeature]) -> tuple[torch.Tensor, int]:
        """Positions [position_rows, len(token_ids)], int64 on CPU, and the delta of what follows.

        A token generated at index i has position i + delta in every row.
        """

    def prompt_inputs(self, token_ids: Sequence[int], features: Sequence[MMFeature]) -> PromptInputs:
        """All that a prompt gives the decoder beside tokens and rows. Called off the engine's thread.

        InvalidRequest for items that do not fit their places.
        """
        return PromptInputs(*self.positions(token_ids, features))

    def generated_inputs(self, token_ids: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """The further inputs, [T, ...] each, of generated tokens; only where `takes_inputs`."""
        return {}

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings [T, hidden_size] of token_ids [T]."""

    @abstractmethod
    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        merged: MergedEmbeds | None,
        attention: object,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] of a flattened ragged batch.

        `embeds` [T, hidden_size] are token embeddings; `merged` rows are written over them (their first
        hidden_size columns) and added in the deepstack layers (the columns after). `attention` reaches
        the registered attention function as the keyword `attn_metadata`. `inputs` [T, ...] are given only
        where the decoder `takes_inputs`. Where the attention's `states` are set they are the decoder's cache:
        the batch is one sequence, or has one token of each.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, vocab_size] of hidden [N, hidden_size], in the model's dtype; of several ranks only on rank 0.

        The other ranks get NaN of that shape.
        """

    def project_cross(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer, cross keys and values [R, num_kv_heads, head_dim] of one item's rows [R, width].

        Called once per item, outside of `forward`, whose cross modules compute queries only.
        """
        raise NotImplementedError("only encoder-decoder models have cross-attention")

    def prompt_defaults(self, options: Options) -> PromptDefaults:
        """The decoder prompt of a task (`options` by the family); InvalidRequest for what it cannot do."""
        raise NotImplementedError("only encoder-decoder models have a decoder prompt of their own")

    def logits_rules(self, defaults: GenerationDefaults, options: Options) -> tuple[LogitsRule, ...]:
        """The rules of one request, in their order, from the checkpoint's defaults and the task."""
        return ()
