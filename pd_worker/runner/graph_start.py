"""Start-up of decode graphs: their sizes by the flags, their memory, and their capture."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from triptych.base.config import PDConfig, format_size
from triptych.base.errors import ConfigError
from triptych.base.machine.device import DeviceMemory
from triptych.base.machine.device_fault import check_device
from triptych.base.machine.graphs import GraphBackend, graph_backend
from triptych.models.base import DecoderSide
from triptych.pd_worker.attention.attention import backend_on
from triptych.pd_worker.attention.metadata import PagedKVCache
from triptych.pd_worker.runner.capacity import max_model_len
from triptych.pd_worker.runner.decode_graphs import DecodeGraphs, DecodeSize, decode_sizes, shown
from triptych.pd_worker.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

#: Graphs that are captured to measure: the largest, whose memory pool all share, and some smaller ones.
_MEASURED = 4


def capture_decode_graphs(config: PDConfig, decoder: DecoderSide, runner: ModelRunner) -> None:
    """Captures the runner's decode graphs, of all sizes; `runner` has a spare block.

    Where that fails: without graphs and with a warning for auto, else ConfigError.
    """
    began = time.monotonic()
    sizes = sizes_of(config, decoder)
    try:
        runner.use_graphs(graph_backend(config.decode_graphs, decoder.device, "--decode-graphs"), sizes)
    except ConfigError:
        raise
    except Exception as error:
        check_device(error, decoder.device)
        # torch raises many types of errors for what a graph cannot hold, and for memory.
        if config.decode_graphs != "auto":
            raise ConfigError(
                f"--decode-graphs {config.decode_graphs}: this model's decode step cannot be captured: "
                f"{error}; use --decode-graphs off, or lower --max-num-seqs where memory is short"
            ) from error
        logger.warning("decode steps run without graphs, since one could not be captured", exc_info=True)
        return
    logger.info(
        "captured decode graphs (%s): %s, %s of buffers, in %.1f s",
        config.decode_graphs, shown(sizes), format_size(runner.graph_bytes), time.monotonic() - began,
    )  # fmt: skip


def sizes_of(config: PDConfig, decoder: DecoderSide) -> list[DecodeSize]:
    """The sizes of this worker's decode graphs."""
    longest = max_model_len(config, decoder.geometry, decoder.dtype)
    rows = 0 if decoder.cross is None else decoder.cross.max_rows or longest
    blocks, cross_blocks = (-(-count // config.block_size) for count in (longest, rows))
    return decode_sizes(config.max_num_seqs, blocks, cross_blocks)


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
