"""Limits of a device, and what stages cannot do without."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.engine_rounds import timings
from triptych.base.machine.resources import cpu_name
from triptych.models.base import DecoderSide, EncoderSide, PreparedItem
from triptych.models.weights.loading import parameter_bytes
from triptych_bench.simulator.costs.costs import CHIPS

#: Bytes read, and the side of the matrices multiplied, to measure a device: small ones are for a CPU.
_READ, _SIDE = {"cpu": 256 << 20, "cuda": 4 << 30}, {"cpu": 1024, "cuda": 8192}
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What a device can do at most, per second: bytes read, and FLOPs in the model's dtype."""

    bandwidth: float
    flops: float

    def said(self) -> str:
        """What a page says before its tables."""
        return (
            f"Limits of the device: {self.bandwidth / 1e9:.0f} GB/s, {self.flops / 1e12:.2f} TFLOP/s. The "
            "share: the time that these allow, divided by the time it took, and the limit that counts."
        )


def known_limits(device: str, dtype: torch.dtype) -> DeviceLimits:
    """The limits of the data sheet, where the device's name is a known one; else measured ones."""
    name = device_name(device).upper()
    # The longest name first: "L40S" has "L4" in it.
    for key in sorted(CHIPS, key=len, reverse=True):
        if key.partition("-")[0].upper() in name and device != "cpu":
            return DeviceLimits(CHIPS[key].bandwidth, CHIPS[key].flops)
    return measured_limits(device, dtype)


def measured_limits(device: str, dtype: torch.dtype) -> DeviceLimits:
    """The device's own rates, the best of some rounds: a sum over a large tensor, a product of matrices."""
    limits = DeviceLimits(_bandwidth(device), _flops(device, dtype))
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # what is measured next may be memory
    return limits


def _bandwidth(device: str) -> float:
    nbytes = _READ[torch.device(device).type]
    return nbytes / min(timings(torch.ones(nbytes // 4, device=device).sum, device, _ROUNDS))


def _flops(device: str, dtype: torch.dtype) -> float:
    side = _SIDE[torch.device(device).type]
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / min(timings(lambda: a @ b, device, _ROUNDS))


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage cannot do without: bytes read from the device's memory, and FLOPs."""

    nbytes: float
    flops: float

    def min_seconds(self, limits: DeviceLimits) -> float:
        return max(self.nbytes / limits.bandwidth, self.flops / limits.flops)

    def bound(self, limits: DeviceLimits) -> str:
        """Which of the two takes longer: "bandwidth" or "arithmetic"."""
        return "bandwidth" if self.nbytes / limits.bandwidth >= self.flops / limits.flops else "arithmetic"

    def ratio(self, seconds: float, limits: DeviceLimits) -> str:
        """The share of the limit that was reached in `seconds`, and which limit: "0.71 of bandwidth"."""
        return f"{self.min_seconds(limits) / seconds:.2f} of {self.bound(limits)}"


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

    def prefill(self, tokens: int, context: int = 0) -> Work:
        """A part of one prompt behind `context` tokens of it; the head is needed for its last token."""
        linear = 2 * (tokens * self.layer_weights + self.head_weights)
        # Causal: half of all pairs of its own tokens.
        attention = (4 * tokens * context + 2 * tokens * tokens) * self.attention_width
        return Work(self.weight_bytes + (context + tokens) * self.token_bytes, linear + attention)


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


def device_name(device: str) -> str:
    return cpu_name() if device == "cpu" else torch.cuda.get_device_name(device)
