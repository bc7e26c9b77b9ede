"""Cost models of devices that were not measured here: a roofline of Qwen3-VL, and what is published.

Every stage is FLOPs / (peak x share reached) + bytes / (bandwidth x share reached), in bfloat16; both are
added where a real chip overlaps them in part, so that steps are rather too long than too short.
docs/planner.md names the source of every figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.base.errors import ConfigError
from triptych.simulator.costs.costs import CostModel, EncoderCosts, ModelShape, PDCosts, ProxyCosts

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


def chip_named(name: str) -> Chip:
    """ConfigError naming the ones there are."""
    if name.lower() not in CHIPS:
        raise ConfigError(f"--gpu {name!r} is not known: use one of {', '.join(CHIPS)}, or a profile's file")
    return CHIPS[name.lower()]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layers and widths of a Qwen3-VL, as its config.json has them."""

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

    @property
    def text_parameters(self) -> int:
        """Of all layers: query, output, key and value projections, and the gated MLP."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * _BF16

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

#: huggingface.co/Qwen/Qwen3-VL-8B-Instruct, config.json.
QWEN3_VL_8B = replace(
    QWEN3_VL_4B,
    hidden=4096,
    intermediate=12288,
    vit_layers=27,
    vit_hidden=1152,
    vit_intermediate=4304,
)

#: preprocessor_config.json of both: 256² to 4096² pixels; its chat template around a message and a picture.
QWEN3_VL_4B_SHAPE = ModelShape(
    patch=16,
    merge=2,
    min_pixels=65536,
    max_pixels=16777216,
    row_bytes=QWEN3_VL_4B.row_bytes,
    kv_token_bytes=QWEN3_VL_4B.kv_token_bytes,
    prompt_overhead_tokens=8,
    item_overhead_tokens=2,
)


def shape_of(geometry: Geometry) -> ModelShape:
    """The sizes of a Qwen3-VL that has the processor and the chat template of the 4B."""
    return replace(QWEN3_VL_4B_SHAPE, row_bytes=geometry.row_bytes, kv_token_bytes=geometry.kv_token_bytes)


def published(name: str, geometry: Geometry = QWEN3_VL_4B) -> CostModel:
    """Costs of Triptych with this device under every worker. ConfigError for an unknown name."""
    chip = chip_named(name)
    return CostModel(
        name=f"Qwen3-VL on {chip.name}",
        source="roofline and published figures, see benchmarks/simulator/costs/published.py; not measured",
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
    attention = 4 * geometry.heads * geometry.head_dim * geometry.layers
    return PDCosts(
        step=STEP_OVERHEAD + parameters * _BF16 / bandwidth,
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
