"""Memory of decode graphs, measured before the KV cache takes what is left of the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from triptych.base.config import PDConfig
from triptych.base.machine.device import DeviceMemory
from triptych.base.machine.device_fault import check_device
from triptych.base.machine.graphs import GraphBackend, graph_backend
from triptych.models.base import DecoderSide
from triptych.pd_worker.attention.backends import backend_on
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache
from triptych.pd_worker.runner.decode_graphs import DecodeGraphs
from triptych.pd_worker.runner.decode_sizes import DecodeSize
from triptych.pd_worker.runner.graph_start import sizes_of

logger = logging.getLogger(__name__)

#: Graphs that are captured to measure: the largest, whose memory pool all share, and some smaller ones.
_MEASURED = 4


def measured_graph_bytes(
    config: PDConfig, decoder: DecoderSide, memory: DeviceMemory, backend: GraphBackend | None = None
) -> int | None:
    """Bytes of all decode graphs, of which some are captured over a cache of one block; None if that fails.

    Besides tensors these are the driver's copies of the graphs, which torch's allocator does not know.
    """
    backend = backend or graph_backend(config.decode_graphs, decoder.device, "--decode-graphs")
    assert backend is not None
    cache = PagedKVCache.of_decoder(decoder, num_blocks=1, block_size=config.block_size)
    graphs = DecodeGraphs(
        decoder, cache, backend, sizes_of(config, decoder), spare_block=0,
        attention_backend=backend_on(decoder.device, config.attention_backend),
    )  # fmt: skip
    memory.reset_peak()
    try:
        return graph_bytes(graphs.sizes, graphs.capture_size, memory.free)
    except Exception as error:
        check_device(error, decoder.device)
        logger.warning("the memory of decode graphs is estimated: one could not be captured", exc_info=True)
        return None
    finally:
        del graphs
        memory.reset_peak()


def graph_bytes(
    sizes: Sequence[DecodeSize], capture: Callable[[DecodeSize], None], free: Callable[[], int]
) -> int:
    """Bytes that `free` loses to graphs of all `sizes`, of which the largest are captured.

    The first one makes the pool; each that is not captured counts as the mean of the others.
    """
    taken, before = [], free()
    for size in sorted(sizes, reverse=True)[:_MEASURED]:
        capture(size)
        now = free()
        taken.append(max(0, before - now))
        before = now
    left = len(sizes) - len(taken)
    return sum(taken) + (-(-sum(taken[1:]) * left // len(taken[1:])) if left else 0)
