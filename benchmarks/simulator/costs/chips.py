"""Devices by their makers' data sheets, and the shares of their peaks that serving reaches: not measured.

Peaks are dense bfloat16:

- A100 80GB SXM (312 TFLOPS, 2039 GB/s), H100 SXM (989.5, 3350), H200 SXM (989.5, 4800), L4 (121, 300) and
  L40S (362, 864): NVIDIA's data sheets; where a sheet gives figures with sparsity, half of them.
- GB200, one of its GPUs (2500, 8000): NVIDIA's GB200 NVL72 sheet, 180 PFLOPS of 72 GPUs.
- B60: Intel's sheet of the Arc Pro B60, 197 TOPS of int8, of which bfloat16 is half; 456 GB/s.
- CPU: one NUMA node of a Xeon 6747P, 24 cores of 2.7 GHz: AMX multiplies two tiles of 16 x 32 bfloat16 in 16
  cycles, 1024 FLOP per core and cycle; four channels of DDR5-6400.

Shares:

- `matmul` of A100: one serves 5967 tokens/s of Qwen3-14B (14.8 G parameters; 2000 in, 100 out) with vLLM 0.11
  and 7474 with TensorRT-LLM: 57 % and 71 % of its peak, decode steps included; an H100 serves 10597 with
  vLLM: 32 % (docs.gpustack.ai, performance lab, qwen3-14b). For prefill alone, in layers of half that width,
  0.6 on A100 and 0.45 on H100 and H200 are taken. L4, L40S, B60 and GB200: 0.5, 0.5, 0.45 and 0.35, assumed.
- `matmul` and `attention` of CPU: SGLang's report of CPU encoders (lmsys.org, 29 May 2026) sets one such node
  at a twelfth of an L40S for the tower of Qwen3-VL-8B. Ours is that twelfth for linear layers and attention
  alike.
- `attention` of GPUs: FlashAttention-2 reaches 50 to 73 % on A100 (arXiv 2307.08691), FlashAttention-3 up to
  75 % on H100 at long sequences, 43 % at 512 (arXiv 2407.08608; its kernel benchmark). 0.5 for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.errors import ConfigError

_CPU_PEAK = 24 * 2.7e9 * 1024
_L40S_PEAK = 362e12
#: SGLang's ratio of an L40S to a CPU node.
CPU_RATIO = 12


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
    "cpu": Chip(
        "Xeon 6747P NUMA node",
        _CPU_PEAK,
        205e9,
        0.5 * _L40S_PEAK / CPU_RATIO / _CPU_PEAK,
        128 * 10**9,
        attention=0.5 * _L40S_PEAK / CPU_RATIO / _CPU_PEAK,
    ),
}


def chip_named(name: str) -> Chip:
    """ConfigError naming the ones there are."""
    if name.lower() not in CHIPS:
        raise ConfigError(f"--gpu {name!r} is not known: use one of {', '.join(CHIPS)}, or a profile's file")
    return CHIPS[name.lower()]
