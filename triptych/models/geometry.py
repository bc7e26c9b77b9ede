"""Shapes and rules of a decoder's layers: attention spans, keys and values, sizes of both attentions."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from triptych.models.recurrent import StateShape


class SpanRule(enum.Enum):
    """How a layer's attention treats the spans of a prompt that attend both ways."""

    #: It is causal inside them.
    NONE = enum.auto()
    #: They attend both ways, as far back as its window reaches.
    CUT = enum.auto()
    #: They attend both ways, whatever its window.
    WHOLE = enum.auto()


@dataclass(frozen=True, slots=True)
class LayerRule:
    """The tokens that a layer reaches: of the last `window`, and in the query's `chunk`; None: no limit."""

    window: int | None = None
    chunk: int | None = None
    spans: SpanRule = SpanRule.WHOLE


@dataclass(frozen=True, slots=True)
class KVShape:
    """Sizes of one layer's keys and values."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Elements of one token."""
        return self.heads * (self.key_dim + self.value_dim)


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
    #: What recurrent layers keep of each sequence.
    states: tuple[StateShape, ...] = ()
    #: Of each layer, where they are not all of `num_kv_heads` and `head_dim`.
    kv_shapes: tuple[KVShape, ...] = ()

    @property
    def layers(self) -> tuple[KVShape, ...]:
        """The shapes of all layers' keys and values."""
        same = KVShape(self.num_kv_heads, self.head_dim, self.head_dim)
        return self.kv_shapes or (same,) * self.num_layers

    @property
    def keeps_inside(self) -> bool:
        """States of recurrent layers can be kept inside a chunk."""
        return all(shape.inside for shape in self.states)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's states of recurrent layers."""
        return sum(shape.nbytes for shape in self.states)

    @property
    def token_elements(self) -> int:
        """Elements of one token's keys and values over all layers."""
        return sum(shape.elements for shape in self.layers)


#: Rows of one item where the encoder itself has no limit: attention grows with their square.
MAX_ROWS = 4096


@dataclass(frozen=True, slots=True)
class CrossGeometry:
    """Sizes of an encoder-decoder model's cross-attention; its keys and values live in the KV cache's blocks.

    Layer i's are kept in layer i's tensors, so that layers, kv heads and head_dim are those of the decoder's
    own attention. `width` are the columns of an encoder row, `max_rows` the encoder's positions (None: no
    limit of the model's).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    width: int
    max_rows: int | None = None


def row_parts(geometry: DecoderGeometry, cross: CrossGeometry | None) -> int:
    """Equal parts of an embedding's row: itself, and its deepstack levels."""
    return 1 + geometry.deepstack_levels if cross is None else 1


def row_width(geometry: DecoderGeometry, cross: CrossGeometry | None) -> int:
    """Columns of an embedding's row, those of deepstack levels included."""
    return geometry.hidden_size * row_parts(geometry, cross) if cross is None else cross.width
