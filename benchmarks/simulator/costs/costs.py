"""What every stage costs on one machine, and the geometry of the model that it serves. Seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from triptych.base.errors import ConfigError
from triptych.pd_worker.core.outputs import ScheduledChunk

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EncoderCosts:
    """`prepare_item` and `prepare_pixel`: decoding and preprocessing; `tower_batch`, `tower_item`,
    `tower_patch` and `tower_pair`: one call of the tower; `save_item` and `save_byte`: one embedding into the
    store.

    `tower_pair` is per pair of patches of one item: attention grows with their square, which a picture of
    1600 patches feels (a quarter of the FLOPs of Qwen3-VL-4B's tower) and a small one does not.
    """

    prepare_item: float
    prepare_pixel: float
    tower_batch: float
    tower_item: float
    tower_patch: float
    save_item: float
    save_byte: float
    tower_pair: float = 0.0

    def prepare(self, pixels: int) -> float:
        """Seconds of one picture of width x height `pixels`."""
        return self.prepare_item + self.prepare_pixel * pixels

    def tower(self, items: int, patches: int) -> float:
        """Seconds of one batch of `items` alike, `patches` together; nothing without items."""
        if not items:
            return 0.0
        pairs = patches * patches / items
        return (
            self.tower_batch + self.tower_item * items + self.tower_patch * patches + self.tower_pair * pairs
        )

    def save(self, nbytes: int) -> float:
        """Seconds until an embedding of `nbytes` has landed."""
        return self.save_item + self.save_byte * nbytes


@dataclass(frozen=True, slots=True)
class PDCosts:
    """`step`: a step whatever is in it; `prefill_token` and `prefill_context`: per prompt token, and per
    prompt token and token before it; `decode_seq` and `context_token`: per sequence that decodes, and per
    token that it looks back on; `load_item` and `load_byte`: one embedding out of the store; `take_request`
    and `take_token`: a request on its way to the scheduler, parsed, rendered and tokenised.
    """

    step: float
    prefill_token: float
    decode_seq: float
    context_token: float
    prefill_context: float
    load_item: float
    load_byte: float
    take_request: float = 0.0
    take_token: float = 0.0

    def take(self, prompt_tokens: int) -> float:
        """CPU seconds of a request before the scheduler has it."""
        return self.take_request + self.take_token * prompt_tokens

    def step_seconds(
        self, prefill_tokens: int, decode_seqs: int, context_tokens: int, prefill_context: float
    ) -> float:
        """Seconds of one step.

        `context_tokens` sums the context lengths of the sequences that decode, `prefill_context` tokens
        times mean context over the prefill chunks.
        """
        return (
            self.step
            + self.prefill_token * prefill_tokens
            + self.decode_seq * decode_seqs
            + self.context_token * context_tokens
            + self.prefill_context * prefill_context
        )

    def load(self, nbytes: int) -> float:
        """Seconds from the fetch of an embedding of `nbytes` to its host copy."""
        return self.load_item + self.load_byte * nbytes


def step_work(chunks: Iterable[ScheduledChunk]) -> tuple[int, int, int, float]:
    """What a step computes, as `PDCosts.step_seconds` takes it."""
    prefill = decodes = context = 0
    prefill_context = 0.0
    for chunk in chunks:
        start, count = chunk.start, chunk.count
        if start >= chunk.state.num_prompt_tokens:
            decodes += count
            context += start + count
        else:
            prefill += count
            prefill_context += chunk_context(start, count)
    return prefill, decodes, context, prefill_context


def chunk_context(start: int, count: int) -> float:
    """`prefill_context` of `count` prompt tokens behind `start` others: tokens times mean context."""
    return count * (start + count / 2)


@dataclass(frozen=True, slots=True)
class ProxyCosts:
    """CPU seconds of a proxy: per request, per picture and per byte of it, per token that it passes on.

    `prompt_token` is 0 for ours, which leaves the prompt's text to the PD worker: it is for servers whose
    front door tokenises and preprocesses for all their replicas.
    """

    request: float
    media_byte: float
    token: float
    item: float = 0.0
    prompt_token: float = 0.0

    def take(self, items: float, media_bytes: float, prompt_tokens: float) -> float:
        """Seconds until a request with so many pictures and tokens of text is on its way."""
        return (
            self.request
            + self.item * items
            + self.media_byte * media_bytes
            + self.prompt_token * prompt_tokens
        )


@dataclass(frozen=True, slots=True)
class CostModel:
    """What every stage costs. `source` says where the figures come from; `rpc` is one message's latency."""

    name: str
    source: str
    encoder: EncoderCosts
    pd: PDCosts
    proxy: ProxyCosts
    rpc: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the served model.

    A picture is resized to multiples of `patch` x `merge` pixels between `min_pixels` and `max_pixels`;
    `merge`² patches make one row of `row_bytes`. Where `fixed_rows` is set, every picture has so many, and
    `max_pixels` after its resize. `prompt_overhead_tokens` is what the chat template adds to a request,
    `item_overhead_tokens` what it adds around a picture.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    row_bytes: int
    kv_token_bytes: int
    prompt_overhead_tokens: int
    item_overhead_tokens: int = 2
    fixed_rows: int = 0

    def plan(self, width: int, height: int) -> tuple[int, int]:
        """(patches, rows) of a picture, by the resize rule of Qwen's processors, or LLaVA's fixed size."""
        if self.fixed_rows:
            return self.max_pixels // self.patch**2, self.fixed_rows
        side = self.patch * self.merge
        w, h = round(width / side) * side, round(height / side) * side
        if w * h > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            w = max(side, math.floor(width / scale / side) * side)
            h = max(side, math.floor(height / scale / side) * side)
        elif w * h < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            w, h = math.ceil(width * scale / side) * side, math.ceil(height * scale / side) * side
        patches = (w // self.patch) * (h // self.patch)
        return patches, patches // self.merge**2


class _WithShape(msgspec.Struct):
    """What `triptych profile` writes beside the costs."""

    shape: ModelShape


def read_costs(path: Path, flag: str = "--costs") -> CostModel:
    """The costs in a file of `triptych profile`; `flag` gave its name.

    ConfigError when it cannot be read, holds no cost model, or one with a cost that cannot be.
    """
    costs = _decode(path, CostModel, "cost model: write one with `triptych profile`", flag)
    stages = {"encoder": asdict(costs.encoder), "pd": asdict(costs.pd), "proxy": asdict(costs.proxy)}
    found = {f"{stage}.{name}": value for stage, part in stages.items() for name, value in part.items()}
    for name, value in (*found.items(), ("rpc", costs.rpc)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{flag} {path}: {name} is {value}, but must be seconds of 0 and above")
    return costs


def read_shape(path: Path, flag: str = "--costs") -> ModelShape:
    """The model's sizes in a file of `triptych profile`; ConfigError when there are none."""
    return _decode(path, _WithShape, "model shape: write one with `triptych profile`", flag).shape


def _decode(path: Path, kind: type[T], wanted: str, flag: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag} {path} holds no {wanted} ({error})") from None
