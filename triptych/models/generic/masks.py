"""What a class's own attention masks say: spans that attend both ways, and how each layer type cuts them.

The masks that a base makes are never materialised for a prompt: a mask function registered under a name of
its own evaluates the class's rule for neighbouring tokens alone. Only the probe at load, of a few tokens,
evaluates it for every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AttentionMaskInterface, PreTrainedConfig

from triptych.models.geometry import SpanRule

#: The attention implementation of a capture's configs, by which its masks come here.
CAPTURE = "triptych_capture"
#: Set on a capture's config where every pair is evaluated.
_EVERY_PAIR = "triptych_every_pair"


def ask_every_pair(config: PreTrainedConfig, on: bool) -> None:
    """Whether masks of this config are [tokens, tokens], not [tokens - 1] of neighbours."""
    setattr(config, _EVERY_PAIR, on)


def _evaluate(
    batch_size: int, q_length: int, kv_length: int, *, mask_function: Callable[..., Any], **options: Any
) -> torch.Tensor:
    """[tokens - 1], True where a token attends to the one after it; or [tokens, tokens]."""
    device = options.get("device", "cpu")
    query = torch.arange(kv_length, device=device)
    if getattr(options.get("config"), _EVERY_PAIR, False):
        rows, keys = query[:, None].expand(-1, kv_length), query[None].expand(kv_length, -1)
    else:
        rows, keys = query[:-1], query[1:]
    none = torch.zeros_like(rows)
    mask: torch.Tensor = torch.as_tensor(mask_function(none, none, rows, keys), device=device)
    return mask.expand(rows.shape)


AttentionMaskInterface.register(CAPTURE, _evaluate)


def spans_of(masks: Mapping[str, torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Stretches [start, end) of tokens that attend to later ones, in any layer type."""
    forward: torch.Tensor | None = None
    for mask in masks.values():
        forward = mask if forward is None else forward | mask
    if forward is None or not bool(forward.any()):
        return ()
    padded = torch.nn.functional.pad(forward.int().cpu(), (1, 1))
    change = padded.diff()
    starts = (change == 1).nonzero().flatten().tolist()
    ends = (change == -1).nonzero().flatten().tolist()
    return tuple((start, end + 1) for start, end in zip(starts, ends, strict=True))


def span_rule(
    mask: torch.Tensor, spans: tuple[tuple[int, int], ...], window: int | None, chunk: int | None
) -> SpanRule | None:
    """The rule that gives this [tokens, tokens] mask; None for a mask that none of them gives."""
    at = torch.arange(mask.shape[0])
    causal = at[None] <= at[:, None]
    near = torch.ones_like(causal) if window is None else at[None] > at[:, None] - window
    if chunk is not None:
        near &= at[None] // chunk == at[:, None] // chunk
    both = torch.zeros_like(causal)
    for start, end in spans:
        both[start:end, start:end] = True
    rules = {
        SpanRule.NONE: causal & near,
        SpanRule.CUT: (causal | both) & near,
        SpanRule.WHOLE: (causal & near) | both,
    }
    return next((rule for rule, allowed in rules.items() if torch.equal(allowed, mask.cpu())), None)
