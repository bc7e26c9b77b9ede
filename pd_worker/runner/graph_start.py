"""Start-up of decode graphs: their sizes by the flags, and their capture."""

from __future__ import annotations

import logging
import time

from triptych.base.config import PDConfig, format_size
from triptych.base.errors import ConfigError
from triptych.base.machine.device_fault import check_device
from triptych.base.machine.graphs import graph_backend
from triptych.models.base import DecoderSide
from triptych.pd_worker.runner.capacity import max_model_len
from triptych.pd_worker.runner.decode_sizes import DecodeSize, decode_sizes, shown
from triptych.pd_worker.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


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
