"""Roofline of a stage: the seconds that a device's bandwidth and arithmetic allow, against those measured.

A stage takes at least the time of its bytes (weights and KV cache, each read once) and at least that of its
FLOPs, whichever is longer. The ratio of that time to the measured one is 1.0 at the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.device_limits import DeviceLimits
from triptych.models.base import DecoderSide, EncoderSide, PreparedItem
from triptych.models.weights.loading import parameter_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage cannot do without: bytes read from the device's memory, and FLOPs."""

    nbytes: float
    flops: float

    def least_seconds(self, limits: DeviceLimits) -> float:
        return max(self.nbytes / limits.bandwidth, self.flops / limits.flops)

    def bound(self, limits: DeviceLimits) -> str:
        """Which of the two takes longer: "bandwidth" or "arithmetic"."""
        return "bandwidth" if self.nbytes / limits.bandwidth >= self.flops / limits.flops else "arithmetic"

    def ratio(self, seconds: float, limits: DeviceLimits) -> str:
        """The share of the limit that was reached in `seconds`, and which limit: "0.71 of bandwidth"."""
        return f"{self.least_seconds(limits) / seconds:.2f} of {self.bound(limits)}"


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """A decoder as its steps meet it.

    `weight_bytes` are read in every step; a table of embeddings that is not the head's is none of them.
    `layer_weights` and `head_weights` are elements, each multiplied once per token. `token_bytes` is one
    token's part of the KV cache, `attention_width` layers x heads x head_dim.
    """

    weight_bytes: int
    layer_weights: int
    head_weights: int
    token_bytes: int
    attention_width: int

    def decode(self, batch: int, context: float) -> Work:
        """One step of `batch` sequences, each with `context` tokens."""
        linear = 2 * batch * (self.layer_weights + self.head_weights)
        attention = 4 * batch * context * self.attention_width
        return Work(self.weight_bytes + batch * context * self.token_bytes, linear + attention)

    def prefill(self, tokens: int) -> Work:
        """One prompt from its begin; the head is needed for its last token."""
        linear = 2 * (tokens * self.layer_weights + self.head_weights)
        # Causal: half of all pairs of tokens.
        attention = 2 * tokens * tokens * self.attention_width
        return Work(self.weight_bytes + tokens * self.token_bytes, linear + attention)


def decoder_size(decoder: DecoderSide) -> DecoderSize:
    """The sizes of a decoder with one head; elements of the KV cache have the decoder's dtype."""
    geometry, module = decoder.geometry, decoder.module
    tables = {
        id(part.weight): part.weight for part in module.modules() if isinstance(part, torch.nn.Embedding)
    }
    matrices = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    # The last one of so many rows: the table of embeddings comes before it, or is the head too.
    head = [parameter for parameter in matrices if parameter.shape[0] == geometry.vocab_size][-1]
    unread = sum(t.numel() * t.element_size() for key, t in tables.items() if key != id(head))
    layers = [p for p in matrices if p is not head and id(p) not in tables]
    width = geometry.num_layers * geometry.head_dim
    return DecoderSize(
        parameter_bytes(module) - unread,
        sum(parameter.numel() for parameter in layers),
        head.numel(),
        2 * width * geometry.num_kv_heads * decoder.dtype.itemsize,
        width * geometry.num_heads,
    )


@torch.inference_mode()
def tower_work(encoder: EncoderSide, items: Sequence[PreparedItem]) -> Work:
    """One call of the tower over `items`: its weights once, and the FLOPs of its matrix products."""
    with FlopCounterMode(display=False, custom_mapping=_cpu_operators()) as counter:
        encoder.encode(items)
    return Work(parameter_bytes(encoder.module), counter.get_total_flops())


def _cpu_operators() -> dict[Any, Callable[..., int]]:
    """FLOPs of operators that torch's counter does not know, by the shapes of their inputs."""

    def linear(x: Sequence[int], weight: Sequence[int], *rest: object, **named: object) -> int:
        return 2 * math.prod(x) * weight[0]

    def attention(
        q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: object, **named: object
    ) -> int:
        return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])

    known: dict[Any, Callable[..., int]] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention
    }
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        known[torch.ops.mkldnn._linear_pointwise] = linear
    return known
