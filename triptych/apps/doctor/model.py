"""The checks of a model's folder and of the devices for it: family, sizes, memory, and its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.apps.doctor.finding import CheckResult, fail, note, ok
from triptych.apps.launch.model_path import model_name, resolve_model
from triptych.apps.launch.plan.memory import (
    MemoryPlan,
    check_fits,
    decoding_budget,
    plan_memory,
    weight_bytes,
)
from triptych.base.config import CPU_SHARE, ClusterConfig, PDConfig, check_scaled, format_size
from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.machine.resources import available_memory
from triptych.base.types import INT8

if TYPE_CHECKING:
    import torch

    from triptych.models.geometry import CrossGeometry, DecoderGeometry
    from triptych.models.registry import Family


def largest_image(processor: Mapping[str, Any], limits: Mapping[str, int]) -> CheckResult:
    """`limits`: the most rows of an image, by the flag that sets them, like "--max-model-len 4096"."""
    size = processor["size"]
    if "merge_size" not in processor:
        target = processor.get("crop_size") or size
        return ok("largest image", f"any: it is scaled to {target['width']}x{target['height']} pixels")
    # A row is a square of this side, and an image whole rows of them.
    side = int(processor["patch_size"]) * int(processor["merge_size"])
    own = int(size["longest_edge"]) // side**2
    flag, rows = min(limits.items(), key=lambda limit: limit[1])
    if own <= rows:
        return ok("largest image", f"{_shown(own, side)}; larger ones are scaled down to it")
    if rows < 1:
        return fail("largest image", f"none fits into {flag}", f"raise {flag.partition(' ')[0]}")
    shown = f"{_shown(rows, side)} by {flag}; the model's own limit is {_shown(own, side)}"
    remedy = f"raise {flag.partition(' ')[0]}, or ask for max_pixels {rows * side**2} in mm_processor_kwargs"
    return note("largest image", shown, remedy)


def _shown(rows: int, side: int) -> str:
    edge = math.isqrt(rows) * side
    return f"{edge}x{edge} pixels ({rows} rows)"


def check_model(config: ClusterConfig, given: str, pictures: str = "") -> Iterator[CheckResult]:
    """What config.json says, whether it fits, and last whether the weights load, with what int8 rows cost.

    ConfigError, after the results so far, for a model that would not work or not fit.
    """
    check_scaled(config)
    path, pd = resolve_model(given), config.pd
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if stored:
        yield ok("model", f"{path}, {format_size(stored)} of weights")
    else:
        if any(path.glob("*.bin")):
            from triptych.models.checkpoint.folder import safetensors_files

            safetensors_files(path)  # says that pickles are never loaded
        remedy = "fetch *.safetensors to have tensors, tokenizer, chat template and a sample checked, too"
        yield note("model", f"{path} holds no weights: only its config.json is checked", remedy)
    from triptych.models.checkpoint.architectures import check_architecture
    from triptych.models.checkpoint.first_checks import check_model_len
    from triptych.models.checkpoint.folder import read_config
    from triptych.models.checkpoint.pooling import read_task
    from triptych.models.checkpoint.processor_libraries import check_processor_libraries
    from triptych.models.checkpoint.quantized import check_decoder, check_for_engine, read_scaled
    from triptych.models.checkpoint.scaled_weights import described
    from triptych.models.checkpoint.support import check_supported, required_by_flags
    from triptych.models.geometry import row_width
    from triptych.models.parallel.plan import check_divides
    from triptych.models.registry import family_of, resolve_device, resolve_dtype
    from triptych.pd_worker.frontend.first_checks import check_pd_flags
    from triptych.pd_worker.vllm.adapters import read_adapters
    from triptych.pd_worker.vllm.connection import (
        INSTALL,
        check_native,
        check_own,
        choose_engine,
        vllm_program,
    )

    check_supported(path, required_by_flags(pd))
    check_model_len(path, pd)
    check_pd_flags(pd)
    check_architecture(path, read_config(path))
    check_processor_libraries(path)
    device = resolve_device(pd.device)
    family = family_of(path)
    dtype = resolve_dtype(path, device, pd.dtype)
    decoder = family.decoder
    model_config = decoder.read_config(path)
    geometry, cross = decoder.geometry_of(model_config), decoder.cross_of(model_config)
    check_divides(path, geometry.num_heads, geometry.num_kv_heads, pd.tensor_parallel)
    kind = "of" if cross is None else "an encoder-decoder model of"
    modality = family.encoder.modality_of(path)
    yield ok("family", f"{family.name}, {kind} {modality}")
    yield ok("dtype", f"{str(dtype).removeprefix('torch.')} on {device}, quantization {pd.quantization}")
    choice = choose_engine(pd, family.architecture, vllm_program(), read_task(path))
    shown = f"{choice.engine}: {choice.reason}"
    yield note("engine", shown, INSTALL) if INSTALL in choice.reason else ok("engine", shown)
    if choice.engine == "native":
        check_native(pd)
        check_decoder(path, device)
        if stored and (weights := read_scaled(path).weights):
            yield ok("quantized", f"{described(weights.values())}; dequantized to the dtype above")
    elif choice.own:
        check_own(pd)
        check_for_engine(path, replace(pd, engine="vllm"))
    if choice.engine != "native" and pd.lora_modules:
        name = pd.served_model_name or model_name(path)
        adapters = read_adapters(replace(pd, model=str(path), served_model_name=name))
        yield ok("adapters", ", ".join(f"{each.name} of rank {each.rank}" for each in adapters))
    counts = _parameters(path, family)
    for side, count in counts.items():
        yield ok(side, f"{count / 1e6:.1f} M parameters, {format_size(count * dtype.itemsize)}")
    row = row_width(geometry, cross) * dtype.itemsize
    yield ok("embedding", f"{format_size(row)} a row")
    nbytes = sum(counts.values()) * dtype.itemsize
    if stored:
        nbytes = weight_bytes(path, str(dtype).removeprefix("torch."), pd.quantization)
    plan, available = plan_memory(nbytes, config), available_memory()
    yield _kv_cache(geometry, dtype.itemsize, plan, available, config)
    yield ok("model length", f"{geometry.max_position_embeddings} tokens")
    if cross is not None:
        yield _cross(cross, dtype.itemsize)
    elif modality == "image":
        yield _largest_image(path, pd, geometry, dtype, row)
    if any(workers.scaled for workers in config.pools.values()):
        yield ok(
            "workers", f"at most {config.encoders.maximum} encoders, {config.counts.decoding} PD workers"
        )
    yield CheckResult(
        "memory",
        f"{format_size(plan.total)} of {format_size(available)} available",
        details=tuple(plan.table().splitlines()),
    )
    check_fits(plan, available)
    if stored:
        yield from _load(path, family, config, device, dtype, choice.engine == "native", pictures)


def _parameters(path: Path, family: Family) -> dict[str, int]:
    """Parameters of both sides, by config.json; ConfigError for one that describes no model."""
    import torch
    import transformers

    from triptych.models.checkpoint.config import load_config

    config = load_config(path)
    try:
        with torch.device("meta"):
            module = getattr(transformers, family.architecture)._from_config(config)
    except Exception as error:  # of many kinds
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise ConfigError(f"MODEL={path}: config.json describes no model ({reason}): correct it") from error
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    names = {
        "encoder side": family.keys.encoder_names(sizes),
        "decoder side": family.keys.decoder_names(sizes),
    }
    return {side: sum(map(sizes.__getitem__, own)) for side, own in names.items()}


def _kv_cache(
    geometry: DecoderGeometry, itemsize: int, plan: MemoryPlan, available: int, config: ClusterConfig
) -> CheckResult:
    token = geometry.token_elements * itemsize
    shown, pd = f"{format_size(token)} a token", config.pd
    if geometry.slot_bytes:
        shown += f", {format_size(geometry.slot_bytes)} a request for recurrent layers"
    if pd.kv_memory:
        return ok("KV cache", f"{shown}; --kv-memory holds {pd.kv_memory // token} tokens")
    if pd.device != "cpu":
        return ok("KV cache", f"{shown}; automatic: what is left of the device beside the weights")
    decoding = config.counts.decoding
    left = decoding_budget(plan, available, own=0, decoding=decoding)
    if not left:
        return note("KV cache", f"{shown}; automatic: what is left beside the weights, and nothing is left")
    of = f"({format_size(available)} - {format_size(plan.total)}) x {CPU_SHARE:g}"
    of += f" / {decoding} PD workers" if decoding > 1 else ""
    held = f"{of} = {format_size(left)}, {left // token} tokens at most"
    return ok("KV cache", f"{shown}; automatic: what is left beside the weights, {held}")


def _largest_image(
    path: Path, pd: PDConfig, geometry: DecoderGeometry, dtype: torch.dtype, row: int
) -> CheckResult:
    from triptych.models.images import ImageProcessor
    from triptych.pd_worker.runner.capacity import max_model_len

    longest, memory = max_model_len(pd, geometry, dtype), pd.embedding_memory
    limits = {
        f"--max-model-len {longest}": longest - 1,
        f"--encoder-cache-memory {format_size(memory)}": memory // row,
    }
    try:
        return largest_image(ImageProcessor(path).config["settings"], limits)
    except ConfigError as error:
        if any((path / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
            return ok("largest image", "as its own processor sizes them")
        return note("largest image", f"unknown: {str(error).partition(': ')[0]}", "fetch it, too")
    except (KeyError, TypeError, ValueError) as error:
        remedy = "see the sizes in preprocessor_config.json"
        return note("largest image", f"unknown: {type(error).__name__} {error}", remedy)


def _cross(cross: CrossGeometry, itemsize: int) -> CheckResult:
    """What an item takes where it is attended to from beside the prompt."""
    from triptych.models.geometry import MAX_ROWS

    row = 2 * cross.num_layers * cross.num_kv_heads * cross.head_dim * itemsize
    rows = f"{cross.max_rows or MAX_ROWS} rows an item at most"
    return ok("cross", f"{format_size(row)} a row of the KV cache, once for all requests; {rows}")


def _load(
    path: Path,
    family: Family,
    config: ClusterConfig,
    device: torch.device,
    dtype: torch.dtype,
    native: bool,
    pictures: str,
) -> Iterator[CheckResult]:
    """Loads for real: missing or misshapen tensors, and prompts or items that cannot be made, are errors.

    The weights of a decoder that is not `native` are vLLM's.
    """
    from triptych.apps.doctor.rows import check_rows
    from triptych.encoder_worker.loading import warm_up
    from triptych.models.checkpoint.folder import given_template
    from triptych.models.registry import generation_defaults, load_decoder, load_encoder
    from triptych.models.weights.loading import parameter_bytes
    from triptych.pd_worker.attention.attention import ATTENTION_NAME
    from triptych.pd_worker.frontend.prompt import open_checkpoint
    from triptych.pd_worker.frontend.tokenization import check_prompts

    pd = config.pd
    family.encoder.processor_config(path)
    template = given_template(pd.chat_template)
    check_prompts(path)
    encoder = load_encoder(path, device=device, dtype=dtype, quantization=pd.quantization)
    decoder = (
        load_decoder(
            path, device=device, dtype=dtype, attn_implementation=ATTENTION_NAME, quantization=pd.quantization
        )
        if native
        else family.decoder.without_weights(path, dtype=dtype)
    )
    generation_defaults(path)
    prompts, _ = open_checkpoint(
        path, decoder, decoder.geometry.max_position_embeddings, chat_template=template
    )
    try:
        warm_up(encoder)
    except InvalidRequest as error:
        raise ConfigError(f"MODEL={path} cannot take its own sample: {error.message}") from error
    tower = f"load: {format_size(parameter_bytes(encoder.module))} in an encoder"
    if native:
        yield ok("weights", f"{tower}, {format_size(parameter_bytes(decoder.module))} in a PD worker")
    else:
        yield ok("weights", f"{tower}; the decoder's are vLLM's to load")
    if config.encoder.ec_store_rows == INT8:
        if native:
            yield check_rows(path, pictures, encoder, decoder, prompts)
        else:
            yield note("int8 rows", "their loss is not measured", "--engine native measures it")


def check_devices(devices: Sequence[str]) -> list[CheckResult]:
    """Each device that a worker is to use, by what torch sees."""
    try:
        import torch
    except ImportError:
        return [note("device", "torch is not installed: this machine can run a proxy, and no worker")]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [f"{torch.cuda.get_device_name(index)}" for index in range(gpus)]
    return [device_finding(device, names) for device in dict.fromkeys(devices)]


def device_finding(device: str, gpus: Sequence[str]) -> CheckResult:
    """One device, like "cpu" or "cuda:1", where these GPUs are."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return ok("device", "cpu" + (f"; {len(gpus)} GPUs are not used" if gpus else ""))
    if kind == "cuda" and (not index or (index.isdecimal() and int(index) < len(gpus))) and gpus:
        return ok("device", f"{device}: {gpus[int(index or 0)]}, {len(gpus)} in all")
    if kind == "cuda":
        remedy = "see `nvidia-smi`, the pod's GPU limit, and whether torch is built for CUDA"
        return fail("device", f"{device}: {len(gpus)} GPUs are seen", remedy)
    return fail("device", f"{device} is unknown", "--device cpu, cuda or cuda:N")
