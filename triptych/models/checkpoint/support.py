"""The table of features that encoder-decoder models support, and the error for those that they do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from triptych.base.config import EncoderConfig, PDConfig
from triptych.base.errors import ConfigError
from triptych.base.types import Options


@dataclass(frozen=True, slots=True)
class Support:
    """A row. `remedy` is set where the feature is not served; `where` names its tests, or a note."""

    name: str
    title: str
    where: str
    remedy: str = ""

    @property
    def served(self) -> bool:
        return not self.remedy


_SCHEDULING = "`tests/unit/pd_worker/core/test_cross_scheduling.py`"
_SIDES = "`tests/unit/models/families/test_encdec_sides.py`"
_CONFORMANCE = "`tests/unit/pd_worker/attention/test_conformance.py`"
_ENGINE = "`tests/integration/pd_worker/engine/test_encdec_matches_generate.py`"
_RANKS = "`tests/e2e/test_features_together.py`"
MATRIX = (
    Support("infrastructure", "Encoder-decoder infrastructure", _SCHEDULING),
    Support("bart", "BART", _SIDES),
    Support("whisper", "Whisper", "`tests/unit/models/families/test_encdec_sides.py`"),
    Support("t5", "T5", _SIDES),
    Support("mbart", "Other text models: mBART", _SIDES),
    Support("multimodality", "Multimodality", "audio: `tests/unit/encoder_worker/media/test_audio.py`"),
    Support("attention_bias", "Custom attention bias", _SIDES),
    Support("prefix_caching", "Prefix caching", _SCHEDULING),
    Support("choices", "Several choices, `n` > 1", _ENGINE),
    Support("preemption", "Preemption, by recompute or swap", "`tests/e2e/test_swapping.py`"),
    Support("chunked_prefill", "Chunked prefill", _ENGINE),
    Support("backends", "More than one attention backend", _CONFORMANCE),
    Support("image_cross", "Images by cross-attention: TrOCR", "`tests/e2e/test_encoder_decoder.py`"),
    Support(
        "int8", "Weights in 8 bits: `--quantization int8`", "`tests/unit/models/weights/test_quantization.py`"
    ),
    Support(
        "int8_cuda", "Weights in 8 bits on CUDA", "", "leave --quantization at none, or give --device cpu"
    ),
    Support(
        "w8a8",
        "Weights and activations in 8 bits on a CPU: `--quantization w8a8`",
        "`tests/unit/models/weights/test_quantization.py`",
    ),
    Support(
        "scaled_weights",
        "Checkpoints in 8 bits with scales: FP8, compressed-tensors int8 and FP8",
        "`tests/unit/models/checkpoint/test_dequantized.py`",
    ),
    Support(
        "quantization",
        "Other quantized checkpoints in a native decoder: AWQ, GPTQ, NVFP4, bitsandbytes, 4 bits",
        "",
        "give one in 8 bits with scales or an unquantized one, or take --engine vllm (on a CPU integers of 4 "
        "bits alone, with AVX-512), which serves decoder-only models",
    ),
    Support(
        "beam_search",
        "Beam search: `num_beams` in generation_config.json",
        "read as 1, with a warning at the start: `tests/unit/pd_worker/test_worker.py`",
        "choose among answers by `n`",
    ),
    Support("fp8_kv", "KV cache in 8 bits", "", "leave --kv-cache-dtype at auto"),
    Support("tensor_parallel", "Tensor parallelism: `--tensor-parallel`", f"{_RANKS}; never run on CUDA yet"),
    Support("devices", "Devices other than CPUs and CUDA", "", "give --device cpu, cuda or cuda:N"),
    Support("pipeline_parallel", "Pipeline parallelism", "", "give --pipeline-parallel 1, and more workers"),
    Support(
        "speculative",
        "Speculative decoding",
        "",
        "leave --speculative-model out, or take --speculative-config with --engine vllm",
    ),
    Support("sliding_window", "Sliding windows", "", "give a checkpoint without sliding_window"),
    Support(
        "lora",
        "LoRA adapters",
        "",
        "merge the adapter into the checkpoint, or give it to a decoder-only model by --lora-modules, with "
        "--engine vllm",
    ),
)
_BY_NAME = {row.name: row for row in MATRIX}


def check_supported(path: Path, features: Iterable[str]) -> None:
    """ConfigError for the first of `features`, names of rows, that is not served."""
    for name in features:
        row = _BY_NAME[name]
        if not row.served:
            raise ConfigError(f"MODEL={path}: {row.title} cannot be served: {row.remedy}")


def required_by_checkpoint(config: Options, files: Iterable[str] = ()) -> list[str]:
    """The rows that a checkpoint's config.json and its folder's file names ask for."""
    features = []
    if "adapter_config.json" in set(files):
        features.append("lora")
    if config.get("is_encoder_decoder") and config.get("sliding_window"):
        features.append("sliding_window")
    return features


def required_by_flags(flags: EncoderConfig | PDConfig) -> list[str]:
    """The rows that a worker's flags ask for."""
    in_8_bits = flags.quantization == "int8" or (
        flags.quantization == "int8-decoder" and isinstance(flags, PDConfig)
    )
    needs = {
        "tensor_parallel": getattr(flags, "tensor_parallel", 1) != 1,
        "devices": flags.device.partition(":")[0] not in ("cpu", "cuda"),
        "pipeline_parallel": flags.pipeline_parallel != 1,
        "speculative": bool(flags.speculative_model),
        "fp8_kv": flags.kv_cache_dtype != "auto",
        "int8": flags.quantization.startswith("int8"),
        # Each layer would be cast to 16 bits in every call, which moves more bytes than it saves.
        "int8_cuda": in_8_bits and flags.device.startswith("cuda"),
        "w8a8": flags.quantization.startswith("w8a8"),
    }
    return [name for name, is_asked in needs.items() if is_asked]


def table() -> str:
    """The matrix as Markdown."""
    rows = [
        f"| {row.title} | {'yes' if row.served else 'no'} | {row.where or f'refused: {row.remedy}'} |"
        for row in MATRIX
    ]
    return "\n".join(["| what | served | tests, or what to do |", "| --- | --- | --- |", *rows])
