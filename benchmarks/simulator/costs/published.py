"""Cost models of devices that were not measured here: a roofline of Qwen3-VL, and what is published.

Every stage is FLOPs / (peak x share reached) + bytes / (bandwidth x share reached). Both are added where a
real chip overlaps them in part, so that steps are rather too long than too short. Weights, keys and values,
activations and embeddings are bfloat16.

Published figures, none measured by us:

- Peaks, bandwidths and the shares reached of them: `chips`.
- `MEMORY`: vLLM 0.23 decodes Llama-3.1-8B alone at 75 tokens/s on an A100 40GB, 77 % of its bandwidth
  (johnmusgrave.com, "vLLM throughput-latency sweep on NVIDIA A100").
- `PREPARE`: 5 ms for the image processor alone up to 1024x1024 (vLLM pull request 50390, CPU column), and our
  own JPEG decode of noise, 12 ns a pixel on a server core.
- `SAVE`, `LOAD`: 694 and 912 MiB/s of an embedding store over TCP (vLLM pull request 47302).

The engine's own overhead per step and the tower's launch are assumptions, named below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.simulator.costs.chips import Chip, chip_named
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
