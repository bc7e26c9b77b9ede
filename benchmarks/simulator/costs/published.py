"""Cost models of GPUs that were not measured here: a roofline of Qwen3-VL-4B-Instruct, and what is published.

Every stage is FLOPs / (peak x share reached) + bytes / (bandwidth x share reached). Both are added where a
real chip overlaps them in part, so that steps are rather too long than too short. Weights, keys and values,
activations and embeddings are bfloat16.

Published figures, none measured by us:

- Peaks and bandwidths: NVIDIA's data sheets of A100 80GB SXM (312 TFLOPS dense bfloat16, 2039 GB/s), H100 SXM
  (989.5, 3350) and H200 SXM (989.5, 4800).
- `MEMORY`: vLLM 0.23 decodes Llama-3.1-8B alone at 75 tokens/s on an A100 40GB, 77 % of its bandwidth
  (johnmusgrave.com, "vLLM throughput-latency sweep on NVIDIA A100").
- `Gpu.matmul`: one A100 serves 5967 tokens/s of Qwen3-14B (14.8 G parameters; 2000 in, 100 out) with vLLM
  0.11 and 7474 with TensorRT-LLM: 57 % and 71 % of its peak, decode steps included; an H100 serves 10597 with
  vLLM: 32 % (docs.gpustack.ai, performance lab, qwen3-14b). For prefill alone, in layers of half that width,
  0.6 on A100 and 0.45 on H100 and H200 are taken.
- `ATTENTION`: FlashAttention-2 reaches 50 to 73 % on A100 (arXiv 2307.08691), FlashAttention-3 up to 75 % on
  H100 at long sequences, 43 % at 512 (arXiv 2407.08608; its kernel benchmark). 0.5 for both.
- `PREPARE`: 5 ms for the image processor alone up to 1024x1024 (vLLM pull request 50390, CPU column), and our
  own JPEG decode of noise, 12 ns a pixel on a server core.
- `SAVE`, `LOAD`: 694 and 912 MiB/s of an embedding store over TCP (vLLM pull request 47302).

The engine's own overhead per step and the tower's launch are assumptions, named below.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.errors import ConfigError
from triptych.simulator.costs.costs import CostModel, EncoderCosts, ModelShape, PDCosts, ProxyCosts

_BF16 = 2
_MIB = 1 << 20

#: Shares of the peak that are reached.
MEMORY = 0.77
ATTENTION = 0.5
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
class Gpu:
    """`flops`: dense bfloat16 per second; `bandwidth`: bytes per second; `matmul`: share of `flops` reached
    in linear layers; `memory`: bytes. No price: what one costs per hour differs by ten between sellers.
    """

    name: str
    flops: float
    bandwidth: float
    matmul: float
    memory: int


GPUS = {
    "a100-80g": Gpu("A100 80GB SXM", 312e12, 2039e9, 0.6, 80 * 10**9),
    "h100": Gpu("H100 SXM", 989.5e12, 3350e9, 0.45, 80 * 10**9),
    "h200": Gpu("H200 SXM", 989.5e12, 4800e9, 0.45, 141 * 10**9),
}


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

#: Its preprocessor_config.json: 256² to 4096² pixels; its chat template around a message and a picture.
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


def gpu(name: str) -> Gpu:
    """ConfigError naming the ones there are."""
    if name.lower() not in GPUS:
        raise ConfigError(f"--gpu {name!r} is not known: use one of {', '.join(GPUS)}, or a profile's file")
    return GPUS[name.lower()]


def published(name: str, geometry: Geometry = QWEN3_VL_4B) -> CostModel:
    """Costs of Triptych with this GPU under every worker. ConfigError for an unknown name."""
    chip = gpu(name)
    return CostModel(
        name=f"Qwen3-VL-4B-Instruct on {chip.name}",
        source="roofline and published figures, see benchmarks/simulator/costs/published.py; not measured",
        encoder=encoder_costs(chip, geometry),
        pd=pd_costs(chip, geometry),
        proxy=PROXY,
        rpc=RPC,
    )


def pd_costs(chip: Gpu, geometry: Geometry) -> PDCosts:
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
        prefill_context=attention / (chip.flops * ATTENTION),
        load_item=TRANSFER_ITEM,
        load_byte=1 / LOAD_RATE,
        take_request=TAKE_REQUEST,
        take_token=TAKE_TOKEN,
    )


def encoder_costs(chip: Gpu, geometry: Geometry) -> EncoderCosts:
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
        tower_pair=4 * geometry.vit_hidden * geometry.vit_layers / (chip.flops * ATTENTION),
        save_item=TRANSFER_ITEM,
        save_byte=1 / SAVE_RATE,
    )
