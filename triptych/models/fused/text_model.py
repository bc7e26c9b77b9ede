"""A text model after Llama's pattern, with fused layers and without its class's own forward around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from triptych.models.base import MergedEmbeds
from triptych.models.fused.layers import FusedDecoderLayer, rotary

#: A layer's inputs: hidden states [T, hidden_size], cos, sin, and what reaches the attention function.
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, object], torch.Tensor]
#: Calls the class's own forward: embeddings, positions, merged rows, attention.
OwnForward = Callable[[torch.Tensor, torch.Tensor, MergedEmbeds, object], torch.Tensor]

_TOKENS = 3
#: What a layer is given that a fused one does not need.
_IGNORED = frozenset({"position_ids", "position_embeddings", "attn_metadata", "cache_position"})


class FusedTextModel:
    """Rotary positions, layers and a norm of a text model whose layers are `FusedDecoderLayer`s.

    It holds the text model's own modules. `position_rows` are the rows of a prompt's positions.
    """

    def __init__(self, decoder: Any, hidden_size: int, position_rows: int) -> None:
        self._layers: Sequence[Layer] = decoder.layers
        self._rotary_emb, self._norm = decoder.rotary_emb, decoder.norm
        self._hidden_size, self._position_rows = hidden_size, position_rows

    def __call__(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        merged: MergedEmbeds | None,
        attention: object,
    ) -> torch.Tensor:
        """As `DecoderSide.forward`; `merged` are in the batch's order, on its device and in its dtype."""
        return self.run(self._layers, embeds, positions, merged, attention)

    def run(
        self,
        layers: Sequence[Layer],
        embeds: torch.Tensor,
        positions: torch.Tensor,
        merged: MergedEmbeds | None,
        attention: object,
    ) -> torch.Tensor:
        """With these layers in the place of the model's."""
        levels: tuple[torch.Tensor, ...] = ()
        if merged is not None:
            first, *others = merged.rows.split(self._hidden_size, dim=1)
            embeds, levels = embeds.index_copy(0, merged.index, first), tuple(others)
        hidden = embeds
        rows = positions.unsqueeze(1) if self._position_rows > 1 else positions
        cos, sin = rotary(self._rotary_emb(hidden[None], rows))
        for index, layer in enumerate(layers):
            hidden = layer(hidden, cos, sin, attention)
            if merged is not None and index < len(levels):
                hidden = hidden.index_add(0, merged.index, levels[index])
        normed: torch.Tensor = self._norm(hidden)
        return normed


class _Stub:
    """Stands for one layer in both forwards: its output depends on its input and on which layer it is."""

    def __init__(self, layer: nn.Module, added: torch.Tensor) -> None:
        self.kind, self._added = type(layer).__name__, added
        self.given: dict[str, Any] = {}
        self.cos = self.sin = added

    def own(self, hidden: torch.Tensor, *others: object, **given: Any) -> torch.Tensor:
        """As the class's own forward calls the layer."""
        self.given = {**given, **{f"argument {index}": value for index, value in enumerate(others)}}
        return hidden * 0.5 + self._added

    def fused(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: object
    ) -> torch.Tensor:
        """As `FusedTextModel` calls it."""
        self.cos, self.sin = cos, sin
        return hidden * 0.5 + self._added

    def check(self, attention: object, head_dim: int) -> None:
        """ValueError where the layer is given something else by the class's own forward."""
        given = self.given
        unknown = [n for n, x in given.items() if n not in _IGNORED and x is not None and x is not False]
        if unknown:
            raise ValueError(f"{self.kind} is given {', '.join(unknown)}")
        if given.get("attn_metadata") is not attention:
            raise ValueError(f"{self.kind} is not given what attention needs")
        angles = given.get("position_embeddings")
        if not isinstance(angles, tuple) or len(angles) != 2 or angles[0].dim() != 3:
            raise ValueError(f"{self.kind} is given no cos and sin of all tokens")
        cos, sin = rotary(angles)
        if cos.shape != (_TOKENS, 1, head_dim) or cos.dtype != self._added.dtype:
            raise ValueError(f"{self.kind} rotates a part of a head, or in another dtype")
        if not (torch.equal(cos, self.cos) and torch.equal(sin, self.sin)):
            raise ValueError(f"{self.kind} is given other cos and sin")


@torch.no_grad()
def check_text_model(
    decoder: Any,
    fused: Sequence[FusedDecoderLayer],
    own: OwnForward,
    *,
    hidden_size: int,
    position_rows: int,
    levels: int,
) -> None:
    """ValueError unless a `FusedTextModel` does with layers what the class's own forward does with them.

    Both run with the same stubs in the place of the layers: nothing of the weights is computed but the norm.
    """
    for name in ("layers", "rotary_emb", "norm"):
        if name not in decoder._modules:
            raise ValueError(f"{type(decoder).__name__} has no {name}")
    norm = next(decoder.norm.parameters(), None)
    if norm is None:
        raise ValueError(f"{type(decoder).__name__}'s norm has no weight")
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(norm.device, norm.dtype)

    stubs = [_Stub(layer, drawn(hidden_size)) for layer in decoder.layers]
    embeds, attention = drawn(_TOKENS, hidden_size), object()
    positions = torch.randint(0, 30, (position_rows, _TOKENS), generator=generator).to(norm.device)
    index = torch.tensor([1], device=norm.device)
    merged = MergedEmbeds(index, drawn(1, hidden_size * (1 + levels)))
    ours = FusedTextModel(decoder, hidden_size, position_rows)
    try:
        result = ours.run([stub.fused for stub in stubs], embeds, positions, merged, attention)
        with _stubbed(decoder.layers, stubs):
            expected = own(embeds, positions, merged, attention)
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{type(decoder).__name__} cannot be tried: {error}") from error
    for stub, layer in zip(stubs, fused, strict=True):
        stub.check(attention, layer.head_dim)
    if not torch.equal(result, expected):
        raise ValueError(f"{type(decoder).__name__} does something else between its layers")


@contextmanager
def _stubbed(layers: nn.ModuleList, stubs: Sequence[_Stub]) -> Iterator[None]:
    every: list[Any] = list(layers)
    try:
        for layer, stub in zip(every, stubs, strict=True):
            layer.forward = stub.own
        yield
    finally:
        for layer in every:
            layer.__dict__.pop("forward", None)
