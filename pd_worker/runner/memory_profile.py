"""Memory profiling of a PD worker at its start: the peak of one run of the longest batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from triptych.base.config import PDConfig
from triptych.base.machine.device import DeviceMemory
from triptych.base.machine.resources import available_memory
from triptych.models.base import DecoderSide
from triptych.models.recurrent import RecurrentStates
from triptych.pd_worker.attention.attention import backend_on, gathers
from triptych.pd_worker.attention.metadata import (
    AttentionMetadata,
    CrossSpan,
    CrossTables,
    PagedKVCache,
    PrefillSpan,
)
from triptych.pd_worker.item_limits import max_embeddings, parse_item_limits
from triptych.pd_worker.runner.capacity import (
    auto_states,
    block_bytes,
    longest_request,
    max_model_len,
    uses_graphs,
)
from triptych.pd_worker.runner.graph_start import measured_graph_bytes
from triptych.pd_worker.runner.memory_plan import (
    WorkerMemory,
    WorkerNeeds,
    auto_embeddings,
    plan_worker_memory,
)
from triptych.pd_worker.runner.state_pool import state_tensors


def size_kv_memory(
    config: PDConfig, decoder: DecoderSide, memory: DeviceMemory, *, other_peak: int = 0
) -> WorkerMemory:
    """The plan of this worker's memory, from one run of the longest batch.

    `other_peak` is what another model in this process takes while it computes, in turn with this one.
    ConfigError, with the numbers, for what does not fit.
    """
    # A length above the model's is an error of its own.
    max_model_len(config, decoder.geometry, decoder.dtype)
    held = memory.used()
    # The ranks of a worker share a CPU's memory, all of them at once; each GPU is of one rank.
    sharing = config.tensor_parallel if decoder.device.type == "cpu" else 1
    budget = config.device_memory or held + int(memory.free() * memory.share / sharing)
    needs = needs_of(config, decoder, held, max(other_peak, activation_bytes(config, decoder, memory)))
    on_device = decoder.device.type != "cpu" and config.decode_graphs != "static"
    if on_device and uses_graphs(config, decoder.device, decoder.geometry):
        graphs = measured_graph_bytes(config, decoder, memory)
        needs = needs if graphs is None else replace(needs, graphs=graphs + needs.block)
    if not config.encoder_cache_memory:
        needs = needs.with_embeddings(
            auto_embeddings(budget - needs.fixed, embeddings_of_use(config, decoder))
        )
    if decoder.geometry.states and not config.state_memory:
        states = auto_states(budget - needs.fixed, decoder.geometry, config.max_num_seqs)
        needs = replace(needs, states=states)
    host_free = available_memory() // config.tensor_parallel
    return plan_worker_memory(budget, needs, config.kv_memory, host_free=host_free)


def needs_of(config: PDConfig, decoder: DecoderSide, held: int, activations: int) -> WorkerNeeds:
    """The worker's needs, with these two measured."""
    geometry, cross = decoder.geometry, decoder.cross
    block = block_bytes(geometry, config.block_size, decoder.dtype)
    longest = longest_request(config, geometry)
    rows = 0 if cross is None else cross.max_rows or longest
    blocks = -(-longest // config.block_size) + -(-rows // config.block_size)
    # One layer's keys and values of a sequence, and a mask over all that is before its chunk, as bools and as
    # what torch adds.
    in_layer = max(shape.elements for shape in geometry.layers) * config.block_size * decoder.dtype.itemsize
    gathered = -(-max(longest, rows) // config.block_size) * in_layer
    masks = min(config.step_tokens, longest) * longest * (1 + decoder.dtype.itemsize)
    swapped = config.swap_memory if config.preemption == "swap" else 0
    shared = config.share_memory if config.saves_kv or config.looks_for_kv else 0
    on_cpu = decoder.device.type == "cpu"
    if not gathers(backend_on(decoder.device, config.attention_backend), decoder.dtype):
        gathered = masks = 0
    return WorkerNeeds(
        held=held,
        activations=activations,
        gathered=gathered + masks,
        graphs=_graph_bytes(config, decoder, activations, blocks * block),
        embeddings=config.encoder_cache_memory,  # 0: from what is left
        swapped=swapped if on_cpu else 0,
        shared=shared if on_cpu else 0,
        states=config.state_memory if geometry.states else 0,  # 0: from what is left
        block=block,
        max_kv=config.max_num_seqs * blocks * block,
        host=0 if on_cpu else config.encoder_cache_memory + swapped + shared,
        copies_on_host=not on_cpu,
    )


def _graph_bytes(config: PDConfig, decoder: DecoderSide, activations: int, longest: int) -> int:
    """Estimated bytes that decode graphs keep; `longest` are those of the longest request's blocks.

    On CUDA, if none could be measured, their pool beside what other steps take counts too: the activations of
    --max-num-seqs tokens.
    """
    if not uses_graphs(config, decoder.device, decoder.geometry):
        return 0
    spare = block_bytes(decoder.geometry, config.block_size, decoder.dtype)
    # Powers of two up to a maximum, and itself, are less than three times that maximum; entries are 8 bytes.
    tables = 3 * config.max_num_seqs * (longest // spare) * 8
    if config.decode_graphs == "static":
        return spare + tables
    tokens = min(config.step_tokens, longest_request(config, decoder.geometry))
    return spare + tables + activations * config.max_num_seqs // tokens


def embeddings_of_use(config: PDConfig, decoder: DecoderSide) -> int:
    """Bytes of the embeddings that --max-num-seqs requests have at most."""
    geometry, cross = decoder.geometry, decoder.cross
    longest = longest_request(config, geometry)
    if cross is not None:
        row, rows = cross.width, cross.max_rows or longest
    else:
        row = geometry.hidden_size * (1 + geometry.deepstack_levels)
        limits = parse_item_limits(config.limit_mm_per_prompt)
        rows = max_embeddings(limits, decoder, Path(config.model), longest)
    return config.max_num_seqs * rows * row * decoder.dtype.itemsize


def activation_bytes(config: PDConfig, decoder: DecoderSide, memory: DeviceMemory) -> int:
    """The maximum that a prefill of --max-num-batched-tokens takes, with logits of --max-num-seqs requests.

    Without what it writes to the cache.
    """
    memory.reset_peak()
    before = memory.used()
    # Triton compiles at the first call: beside chunks, one decode, whose keys are split, and many.
    triton = backend_on(decoder.device, config.attention_backend) == "triton"
    for decodes in (1, config.max_num_seqs) if triton else (0,):
        written = _run_longest_batch(config, decoder, decodes)
    taken = memory.peak() - before - written
    # What the run has left in the allocator is given back.
    memory.reset_peak()
    return max(0, taken)


@torch.inference_mode()
def _run_longest_batch(config: PDConfig, decoder: DecoderSide, decodes: int) -> int:
    """Runs it, some of its tokens as decodes, and returns the bytes of the cache that it wrote."""
    geometry, device = decoder.geometry, decoder.device
    tokens = min(config.step_tokens, longest_request(config, geometry))
    rows = 0 if decoder.cross is None else decoder.cross.max_rows or tokens
    blocks = max(1, -(-max(tokens, rows) // config.block_size))
    cache = PagedKVCache.of_decoder(decoder, num_blocks=blocks, block_size=config.block_size)
    table = torch.arange(blocks, device=device)
    # Recurrent layers take no batch of both.
    decodes = 0 if geometry.states else min(decodes, tokens - 1)
    lengths = torch.ones(decodes, dtype=torch.int64, device=device)
    cross = None
    if decoder.cross is not None:
        encoded = torch.zeros(rows, decoder.cross.width, dtype=decoder.dtype, device=device)
        decoder.project_cross(encoded)
        span = CrossSpan(table[: -(-rows // config.block_size)], rows)
        cross = CrossTables(span.table.expand(decodes, -1), lengths * rows, [span])
    attention = AttentionMetadata(
        cache=cache,
        slots=torch.arange(tokens, device=device),
        num_decodes=decodes,
        decode_tables=table.expand(decodes, -1),
        decode_lengths=lengths * tokens,
        prefills=[PrefillSpan(decodes, tokens, 0, table[: -(-(tokens - decodes) // config.block_size)])],
        cross=cross,
        bias=decoder.bias,
        layer_rules=decoder.layer_rules,
        backend=backend_on(device, config.attention_backend),
    )
    if geometry.states:
        attention.states = RecurrentStates(state_tensors(geometry.states, 1, device), [0])
    embeds = decoder.embed(torch.zeros(tokens, dtype=torch.int64, device=device))
    positions = torch.arange(tokens, device=device).expand(geometry.position_rows, -1)
    inputs = decoder.generated_inputs([0] * tokens)
    hidden = decoder.forward(embeds, positions, None, attention, **inputs)
    decoder.logits(hidden[: config.max_num_seqs]).float().softmax(-1).sort(-1)
    return cache.token_bytes * tokens
