"""`triptych check`: family, sizes of both sides, and whether a model fits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.config import ClusterConfig, check_scaled, format_size
from triptych.errors import ConfigError, InvalidRequest
from triptych.launch.model_path import resolve_model
from triptych.launch.plan.memory import check_fits, plan_memory
from triptych.machine.resources import available_memory

if TYPE_CHECKING:
    from triptych.models.base import DecoderGeometry, DecoderSide, EncoderSide


def check_model(config: ClusterConfig) -> None:
    """Prints the report; ConfigError when the model would not work or not fit."""
    check_scaled(config)
    path, pd = resolve_model(config.model), config.pd
    from triptych.models.checkpoint.support import check_supported, wanted_by_flags
    from triptych.models.parallel.plan import check_divides
    from triptych.models.registry import (
        family_of,
        generation_defaults,
        load_decoder,
        load_encoder,
        resolve_device,
        resolve_dtype,
    )
    from triptych.models.weights.loading import parameter_bytes

    check_supported(path, wanted_by_flags(pd))
    device = resolve_device(pd.device)
    family = family_of(path)
    dtype = resolve_dtype(path, device, pd.dtype)
    # Loaded for real: a checkpoint with missing or unknown tensors is found here, not in production.
    encoder = load_encoder(path, device=device, dtype=dtype, quantization=pd.quantization)
    decoder = load_decoder(
        path, device=device, dtype=dtype, attn_implementation="sdpa", quantization=pd.quantization
    )
    geometry = decoder.geometry
    generation_defaults(path)
    _check_inputs(path, encoder, decoder)
    check_divides(path, geometry.num_heads, geometry.num_kv_heads, pd.tensor_parallel)
    sides = {"encoder side": encoder.module, "decoder side": decoder.module}
    counts = {name: sum(p.numel() for p in module.parameters()) for name, module in sides.items()}
    held = {name: parameter_bytes(module) for name, module in sides.items()}
    size = dtype.itemsize
    kv_token = _kv_token_bytes(geometry, size)
    lines = [
        f"model         {path}",
        f"family        {family.name}, {_kind(encoder.modality, decoder)}",
        f"dtype         {str(dtype).removeprefix('torch.')} on {device}, quantization {pd.quantization}",
        *(f"{name:<13} {n / 1e6:.1f} M parameters, {format_size(held[name])}" for name, n in counts.items()),
        f"embedding     {format_size(encoder.width * size)} a row",
        f"KV cache      {format_size(kv_token)} a token, {_tokens_held(pd.kv_memory, kv_token)}",
        f"model length  {geometry.max_position_embeddings} tokens",
        *_cross(decoder, size),
    ]
    plan, available = plan_memory(sum(held.values()), config), available_memory()
    lines += [*_workers(config), "memory", plan.table(), f"available     {format_size(available)}"]
    sys.stdout.write("\n".join(lines) + "\n")
    check_fits(plan, available)
    sys.stdout.write("It fits.\n")


def _kv_token_bytes(geometry: DecoderGeometry, size: int) -> int:
    """Bytes of one token's keys and values, with elements of `size` bytes."""
    return 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * size


def _check_inputs(path: Path, encoder: EncoderSide, decoder: DecoderSide) -> None:
    """ConfigError where the workers could make no prompt, or no item, of what a request brings."""
    from triptych.pd_worker.frontend.prompt import open_checkpoint

    open_checkpoint(path, decoder, decoder.geometry.max_position_embeddings)
    try:
        encoder.preprocess(encoder.sample(), {})
    except InvalidRequest as error:
        raise ConfigError(f"MODEL={path} cannot take its own sample: {error.message}") from error


def _tokens_held(kv_memory: int, kv_token: int) -> str:
    """How many tokens --kv-memory holds, where it is given."""
    return f"--kv-memory holds {kv_memory // kv_token}" if kv_memory else "--kv-memory is found at the start"


def _workers(config: ClusterConfig) -> list[str]:
    """The numbers of workers that the memory is for, where they are scaled."""
    if not any(workers.scaled for workers in config.pools.values()):
        return []
    return [f"workers       {config.encoders} encoders and {config.pd_workers} PD workers, by their work"]


def _kind(modality: str, decoder: DecoderSide) -> str:
    """What the model is, in a few words; `modality` is that of its items."""
    return f"of {modality}" if decoder.cross is None else f"an encoder-decoder model of {modality}"


def _cross(decoder: DecoderSide, size: int) -> list[str]:
    """What an item takes where it is attended to from beside the prompt; nothing for other models."""
    from triptych.models.families.text_encoder import MAX_ROWS

    cross = decoder.cross
    if cross is None:
        return []
    row = 2 * cross.num_layers * cross.num_kv_heads * cross.head_dim * size
    rows = f"{cross.max_rows or MAX_ROWS} rows an item at most"
    return [f"cross         {format_size(row)} a row of the KV cache, once for all requests; {rows}"]
