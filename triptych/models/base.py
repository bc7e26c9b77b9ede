"""The contract of a model family: an encoder side that sees media, a decoder side that never does.

A family is one file with two classes and its row in `registry.py`. The encoder side lives in encoder
workers, the decoder side in PD workers; each loads only its own share of the checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from triptych.types import ItemPlan, MMFeature

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """An item after preprocessing: what the tower takes, and what is known of its output.

    `cost` is the item's share of an encoder batch's budget, in patches.
    """

    rows: int
    length: int
    grid_thw: tuple[int, ...]
    cost: int
    tensors: dict[str, torch.Tensor]
    runs: tuple[tuple[int, int], ...] | None = None

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
    def load(cls, path: Path, *, device: torch.device, dtype: torch.dtype) -> EncoderSide:
        """Loads only this side's tensors; nothing missing, nothing left on meta, else ConfigError."""

    @abstractmethod
    def preprocess(self, image: Image.Image, options: Mapping[str, Any]) -> PreparedItem:
        """As the checkpoint's image processor (PIL backend) does it. `image` is RGB.

        `options` are the request's mm_processor_kwargs. InvalidRequest, naming the option, for what the
        processor does not know or the image cannot be.
        """

    @abstractmethod
    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """One [rows, width] tensor per item, contiguous, each with storage of its own."""


@dataclass(frozen=True, slots=True)
class DecoderGeometry:
    """Sizes of the decoder that the KV cache and the positions need."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    #: Rows of the position tensor: 3 for M-RoPE, 1 otherwise.
    position_rows: int
    max_position_embeddings: int
    #: Layers that take a deepstack level each, after the first; 0 when the family has none.
    deepstack_levels: int = 0


@dataclass(frozen=True, slots=True)
class MergedEmbeds:
    """Encoder rows that meet this batch: `index` [N] are batch token indices, `rows` [N, width]."""

    index: torch.Tensor
    rows: torch.Tensor


@dataclass(slots=True)
class GenerationDefaults:
    """The checkpoint's generation_config where a request is silent.

    Without `do_sample` it is greedy: temperature 0, no cuts. Its repetition penalty counts all the same.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class DecoderSide(ABC):
    """Text model and head of one checkpoint on one device; knows nothing of pixels."""

    geometry: DecoderGeometry
    dtype: torch.dtype
    device: torch.device
    module: torch.nn.Module
    #: The token that a chat template puts once per image, and that the placeholder repeats.
    image_token_id: int | None

    @classmethod
    @abstractmethod
    def load(
        cls, path: Path, *, device: torch.device, dtype: torch.dtype, attn_implementation: str
    ) -> DecoderSide:
        """Loads only this side's tensors; nothing missing, nothing left on meta, else ConfigError.

        `attn_implementation` is a name registered with transformers' AttentionInterface.
        """

    @abstractmethod
    def placeholder(self, plan: ItemPlan) -> list[int]:
        """The `plan.length` tokens that stand for the item, in place of the template's one image token.

        InvalidRequest when the plan's rows do not fit its grid.
        """

    @abstractmethod
    def positions(self, token_ids: Sequence[int], features: Sequence[MMFeature]) -> tuple[torch.Tensor, int]:
        """Positions [position_rows, len(token_ids)], int64 on CPU, and the delta of what follows.

        A token generated at index i has position i + delta in every row.
        """

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings [T, hidden_size] of token_ids [T]."""

    @abstractmethod
    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        merged: MergedEmbeds | None,
        attention: Any,
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] of a flattened ragged batch.

        `embeds` [T, hidden_size] are token embeddings; `merged` rows are written over them (their first
        hidden_size columns) and added in the deepstack layers (the columns after). `attention` reaches
        the registered attention function as the keyword `attn_metadata`.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, vocab_size] of hidden [N, hidden_size], in the model's dtype."""
