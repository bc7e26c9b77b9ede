"""A rank's share of its worker: memory and threads; and the loading and sizing that all ranks do alike."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from triptych.base.config import PDConfig
from triptych.base.cpu.threads import decoder_threads, threads_of_rank, use_threads
from triptych.base.machine.device import memory_of
from triptych.base.progress import Progress
from triptych.base.ranks.process_group import check_ranks, device_of
from triptych.models.base import DecoderSide
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.registry import load_decoder, resolve_device, resolve_dtype
from triptych.models.weights.product_choice import choose_products
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.runner.memory_profile import size_kv_memory

logger = logging.getLogger(__name__)


def share_of_rank(config: PDConfig) -> PDConfig:
    """The config of each of --tensor-parallel ranks.

    KV cache, swapped blocks and, on a CPU, all memory are divided by the ranks. Embeddings are not: each rank
    needs all rows.
    """
    ranks = config.tensor_parallel
    if ranks == 1:
        return config
    on_cpu = config.device == "cpu"
    return replace(
        config,
        kv_memory=config.kv_memory // ranks,
        swap_memory=config.swap_memory // ranks,
        device_memory=config.device_memory // ranks if on_cpu else config.device_memory,
    )


def decoder_threads_of_rank(config: PDConfig, hidden_size: int) -> int:
    """Torch threads of one rank: its share of the worker's, at least one."""
    return threads_of_rank(decoder_threads(config.threads, hidden_size), config.tensor_parallel)


def load_share(config: PDConfig, rank: int) -> DecoderSide:
    """The decoder of `config.model`, or this rank's share of it, with this process's threads set.

    ConfigError for a checkpoint or a device that cannot be served so.
    """
    path = Path(config.model)
    parallel = TensorParallel(rank, config.tensor_parallel) if config.tensor_parallel > 1 else None
    device = resolve_device(config.device)
    check_ranks("--tensor-parallel", config.tensor_parallel, device)
    if parallel is not None:
        device = device_of(device, rank)
    decoder = load_decoder(
        path,
        device=device,
        dtype=resolve_dtype(path, device, config.dtype),
        attn_implementation=ATTENTION_NAME,
        quantization=config.quantization,
        parallel=parallel,
    )
    use_threads(decoder_threads_of_rank(config, decoder.geometry.hidden_size))
    choose_products(decoder.module, config.linear_kernel)
    return decoder


def sized(config: PDConfig, decoder: DecoderSide, other_peak: int = 0) -> PDConfig:
    """With the memory that the device has for KV cache and embeddings; on a CPU a given one is enough.

    All ranks call it together: it runs the decoder.
    """
    if config.kv_memory and decoder.device.type == "cpu":
        return config
    with Progress("measuring memory"):
        plan = size_kv_memory(config, decoder, memory_of(decoder.device), other_peak=other_peak)
    logger.info("memory of %s:\n%s", decoder.device, plan.table())
    needs = plan.needs
    return replace(
        config, kv_memory=plan.kv_memory, encoder_cache_memory=needs.embeddings, state_memory=needs.states
    )
