"""What every stage costs on one machine, and the geometry of the model that it serves. Seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from triptych.base.errors import ConfigError
from triptych.pd_worker.core.outputs import ScheduledChunk

Seconds = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class EncoderCosts:
    """`prepare_item` and `prepare_pixel`: decoding and preprocessing; `tower_batch`, `tower_item`,
    `tower_patch` and `tower_pair`: one call of the tower; `save_item` and `save_byte`: one embedding into the
    store.

    `tower_pair` is per pair of patches of one item: attention grows with their square, which a picture of
    1600 patches feels (a quarter of the FLOPs of Qwen3-VL-4B's tower) and a small one does not.
    """

    prepare_item: Seconds
    prepare_pixel: Seconds
    tower_batch: Seconds
    tower_item: Seconds
    tower_patch: Seconds
    save_item: Seconds
    save_byte: Seconds
    tower_pair: Seconds = 0.0

    def prepare(self, pixels: int) -> float:
        """Seconds of one picture of width x height `pixels`."""
        return self.prepare_item + self.prepare_pixel * pixels

    def tower(self, items: int, patches: int) -> float:
        """Seconds of one batch of `items` alike, `patches` together; nothing without items."""
        if not items:
            return 0.0
        attention = self.tower_pair * patches * patches / items
        return self.tower_batch + self.tower_item * items + self.tower_patch * patches + attention

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

    step: Seconds
    prefill_token: Seconds
    decode_seq: Seconds
    context_token: Seconds
    prefill_context: Seconds
    load_item: Seconds
    load_byte: Seconds
    take_request: Seconds = 0.0
    take_token: Seconds = 0.0

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
        prefill = self.prefill_token * prefill_tokens + self.prefill_context * prefill_context
        return self.step + prefill + self.decode_seq * decode_seqs + self.context_token * context_tokens

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

    request: Seconds
    media_byte: Seconds
    token: Seconds
    item: Seconds = 0.0
    prompt_token: Seconds = 0.0

    def take(self, items: float, media_bytes: float, prompt_tokens: float) -> float:
        """Seconds until a request with so many pictures and tokens of text is on its way."""
        texts = self.request + self.prompt_token * prompt_tokens
        return texts + self.item * items + self.media_byte * media_bytes


@dataclass(frozen=True, slots=True)
class CostModel:
    """What every stage costs. `source` says where the figures come from; `rpc` is one message's latency."""

    name: str
    source: str
    encoder: EncoderCosts
    pd: PDCosts
    proxy: ProxyCosts
    rpc: Seconds


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


def read_profile(path: Path, flag: str) -> tuple[CostModel, ModelShape]:
    """Costs and the model's sizes from a file of `triptych profile`; `flag` gave its name.

    ConfigError when it cannot be read, or holds no profile, or one with a cost that cannot be.
    """
    try:
        raw = path.read_bytes()
        return msgspec.json.decode(raw, type=CostModel), msgspec.json.decode(raw, type=_WithShape).shape
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{flag} {path} holds no profile: write one with `triptych profile` ({error})"
        ) from None


# Devices that were not measured here: a roofline of the model, and what is published. Every stage is FLOPs /
# (peak x share reached) + bytes / (bandwidth x share reached), in bfloat16; both are added where a real chip
# overlaps them in part, so that steps are rather too long than too short. The sources are in
# docs/when-to-disaggregate.md.
_BF16 = 2
_MIB = 1 << 20

#: Share of a bandwidth that is reached.
MEMORY = 0.77
#: Seconds of scheduling, sampling and launches in a step, and of launches in a tower call: assumed.
STEP_OVERHEAD = 3e-3
TOWER_OVERHEAD = 5e-3
#: Seconds of sampling and text per sequence in a step: assumed.
SEQUENCE_OVERHEAD = 2e-5
#: Preprocessing: seconds per picture, and per pixel of the file.
PREPARE_ITEM, PREPARE_PIXEL = 5e-3, 12e-9
#: Store: seconds per transfer (two trips and a header: assumed) and bytes per second.
TRANSFER_ITEM, SAVE_RATE, LOAD_RATE = 1e-3, 694 * _MIB, 912 * _MIB
#: Our proxy on a server core, from `triptych profile` on an AMD EPYC.
PROXY = ProxyCosts(request=1.6e-3, item=1.3e-3, media_byte=1e-8, token=1.6e-5)
#: A PD worker's intake on such a core: seconds per request and per token of its prompt.
TAKE_REQUEST, TAKE_TOKEN = 9e-5, 1.1e-6
#: One message inside a data centre.
RPC = 3e-4

_CPU_PEAK = 24 * 2.7e9 * 1024
_L40S_PEAK = 362e12
#: SGLang's ratio of an L40S to a CPU node.
CPU_RATIO = 12
_CPU_SHARE = 0.5 * _L40S_PEAK / CPU_RATIO / _CPU_PEAK


@dataclass(frozen=True, slots=True)
class Chip:
    """`flops`: dense bfloat16 per second; `bandwidth`: bytes per second; `matmul` and `attention`: shares of
    `flops` reached in linear layers and in attention; `memory`: bytes. No price: sellers differ by ten.
    """

    name: str
    flops: float
    bandwidth: float
    matmul: float
    memory: int
    attention: float = 0.5


CHIPS = {
    "a100-80g": Chip("A100 80GB SXM", 312e12, 2039e9, 0.6, 80 * 10**9),
    "h100": Chip("H100 SXM", 989.5e12, 3350e9, 0.45, 80 * 10**9),
    "h200": Chip("H200 SXM", 989.5e12, 4800e9, 0.45, 141 * 10**9),
    "gb200": Chip("GB200 GPU", 2500e12, 8000e9, 0.35, 186 * 10**9),
    "l4": Chip("L4", 121e12, 300e9, 0.5, 24 * 10**9),
    "l40s": Chip("L40S", _L40S_PEAK, 864e9, 0.5, 48 * 10**9),
    "b60": Chip("Arc Pro B60", 98.5e12, 456e9, 0.45, 24 * 10**9),
    "cpu": Chip("Xeon 6747P NUMA node", _CPU_PEAK, 205e9, _CPU_SHARE, 128 * 10**9, _CPU_SHARE),
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layers and widths of an image-text model, as its config.json has them.

    Of a mixture of experts `intermediate` is what a token uses, `stored_intermediate` all of it; 0: no more.
    `recurrent_layers` keep no keys and values.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    vit_layers: int
    vit_hidden: int
    vit_intermediate: int
    patch: int
    merge: int
    deepstack: int
    stored_intermediate: int = 0
    recurrent_layers: int = 0

    @property
    def text_parameters(self) -> int:
        """Used for a token, of all layers: query, output, key and value projections, and the gated MLP."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def stored_parameters(self) -> int:
        """Of the decoder with its head: its weights, which a step of a full batch reads."""
        idle = max(0, self.stored_intermediate - self.intermediate)
        return self.text_parameters + self.layers * 3 * self.hidden * idle + self.head_parameters

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    @property
    def attention_layers(self) -> int:
        return self.layers - self.recurrent_layers

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.attention_layers * self.kv_heads * self.head_dim * _BF16

    @property
    def row_bytes(self) -> int:
        """One row with its deepstack levels."""
        return self.hidden * (1 + self.deepstack) * _BF16

    @property
    def vit_parameters(self) -> int:
        """Used for every patch: the blocks and the patch embedding (two frames of three channels)."""
        block = 4 * self.vit_hidden**2 + 2 * self.vit_hidden * self.vit_intermediate
        return self.vit_layers * block + 2 * 3 * self.patch**2 * self.vit_hidden

    @property
    def merger_parameters(self) -> int:
        """Used for every row: the merger and one like it for each deepstack level."""
        wide = self.vit_hidden * self.merge**2
        return (1 + self.deepstack) * (wide * wide + wide * self.hidden)

    def shape(self, min_pixels: int, max_pixels: int, fixed_rows: int = 0) -> ModelShape:
        """The sizes that requests see; the chat template takes as many tokens as Qwen3-VL's."""
        sizes = {"min_pixels": min_pixels, "max_pixels": max_pixels, "fixed_rows": fixed_rows}
        sizes |= {"row_bytes": self.row_bytes, "kv_token_bytes": self.kv_token_bytes}
        return ModelShape(self.patch, self.merge, prompt_overhead_tokens=8, **sizes)


#: huggingface.co/Qwen/Qwen3-VL-4B-Instruct, config.json.
QWEN3_VL_4B = Geometry(
    layers=36,
    hidden=2560,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=9728,
    vocab=151936,
    vit_layers=24,
    vit_hidden=1024,
    vit_intermediate=4096,
    patch=16,
    merge=2,
    deepstack=3,
)

#: preprocessor_config.json: 256² to 4096² pixels.
QWEN3_VL_4B_SHAPE = QWEN3_VL_4B.shape(65536, 16777216)


def published(name: str, geometry: Geometry = QWEN3_VL_4B, model: str = "Qwen3-VL") -> CostModel:
    """Costs of Triptych with this device of CHIPS under every worker."""
    chip = CHIPS[name]
    return CostModel(
        name=f"{model} on {chip.name}",
        source="roofline and published figures, see triptych_bench/simulator/costs/costs.py; not measured",
        encoder=encoder_costs(chip, geometry),
        pd=pd_costs(chip, geometry),
        proxy=PROXY,
        rpc=RPC,
    )


def pd_costs(chip: Chip, geometry: Geometry) -> PDCosts:
    """Weights are read once a step; tokens are multiplied with the layers, sequences that decode with the
    head too.
    """
    matmul, bandwidth = chip.flops * chip.matmul, chip.bandwidth * MEMORY
    parameters = geometry.text_parameters + geometry.head_parameters
    # Scores and weighted values: two multiply-adds per head dimension, head, layer and token looked back on.
    attention = 4 * geometry.heads * geometry.head_dim * geometry.attention_layers
    return PDCosts(
        step=STEP_OVERHEAD + geometry.stored_parameters * _BF16 / bandwidth,
        prefill_token=2 * geometry.text_parameters / matmul,
        decode_seq=SEQUENCE_OVERHEAD + 2 * parameters / matmul,
        context_token=geometry.kv_token_bytes / bandwidth,
        prefill_context=attention / (chip.flops * chip.attention),
        load_item=TRANSFER_ITEM,
        load_byte=1 / LOAD_RATE,
        take_request=TAKE_REQUEST,
        take_token=TAKE_TOKEN,
    )


def encoder_costs(chip: Chip, geometry: Geometry) -> EncoderCosts:
    """The tower is bound by its FLOPs from the first picture on; its weights are read once a call."""
    matmul = chip.flops * chip.matmul
    weights = (geometry.vit_parameters + geometry.merger_parameters) * _BF16
    per_patch = geometry.vit_parameters + geometry.merger_parameters / geometry.merge**2
    return EncoderCosts(
        prepare_item=PREPARE_ITEM,
        prepare_pixel=PREPARE_PIXEL,
        tower_batch=TOWER_OVERHEAD + weights / (chip.bandwidth * MEMORY),
        tower_item=0.0,
        tower_patch=2 * per_patch / matmul,
        tower_pair=4 * geometry.vit_hidden * geometry.vit_layers / (chip.flops * chip.attention),
        save_item=TRANSFER_ITEM,
        save_byte=1 / SAVE_RATE,
    )
