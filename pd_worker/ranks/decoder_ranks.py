"""The other ranks of a PD worker, as rank 0 sees them: loaded, joined, sized, built, then given steps."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import fields

from triptych.base.config import PDConfig
from triptych.base.engine_beat import EngineBeat
from triptych.base.errors import ConfigError
from triptych.base.ranks.channel import Message, RankFailed
from triptych.base.ranks.group import END_SECONDS, RankGroup
from triptych.base.ranks.process_group import leave
from triptych.ec_connector.base import ECTransferConfig
from triptych.models.base import DecoderSide
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.pd_worker.ranks.share import sized

_READ_BYTES = 4096
_JOIN_SECONDS = 5.0


class ProgressListener:
    """Rank 0's end of a pipe to which the other ranks write when a transfer has made progress.

    Its thread calls `on_progress`. Replies answer commands only, and an idle engine sends none.
    """

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rank-progress", daemon=True)
        self._thread.start()

    @property
    def descriptor(self) -> int:
        """The end to write to, for the other ranks."""
        return self._writing

    def handed_out(self) -> None:
        """The ranks have the end to write to: the thread ends with the last of them."""
        os.close(self._writing)

    def join(self) -> None:
        """Waits for the end of the thread, once all ranks have ended."""
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while os.read(self._reading, _READ_BYTES):
            self._on_progress()
        os.close(self._reading)


class ProgressWriter:
    """Another rank's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        """Keeps a copy of the descriptor."""
        self._descriptor = os.dup(descriptor)
        os.set_blocking(self._descriptor, False)

    def write(self) -> None:
        """Wakes rank 0. Called from any thread; never blocks."""
        # A full pipe wakes rank 0 anyway, and one without a reader belongs to a worker that ends.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._descriptor, b"1")

    def close(self) -> None:
        os.close(self._descriptor)


#: Least seconds that a rank may keep the others waiting in a collective. One that stands still is found by
#: its beat before.
_COLLECTIVE_SECONDS = 120.0
#: The same, where --stall-timeout is 0: for ever, as far as anyone waits.
_FOR_EVER_SECONDS = 7 * 86400.0


class DecoderRanks:
    """Ranks 1 to R-1 of a worker, which `start` starts; `config` is a rank's, see `share_of_rank`.

    For one thread at a time.
    """

    def __init__(self, config: PDConfig) -> None:
        self.size = config.tensor_parallel
        self.parallel = TensorParallel(0, self.size)
        self._seconds = collective_seconds(config.stall_timeout)
        self._group = RankGroup("pd", self.size, config)
        self._progress: ProgressListener | None = None

    @property
    def beats(self) -> list[EngineBeat]:
        """To be watched: a rank that dies or stands still ends the worker."""
        return self._group.beats

    @property
    def pids(self) -> list[int | None]:
        return self._group.pids

    def start(self) -> None:
        """Starts the processes, which load their shares meanwhile."""
        self._group.start()

    def join(self, decoder: DecoderSide) -> None:
        """Waits until all have loaded, and joins their process group. ConfigError as a rank gave it."""
        self._group.wait_ready()
        self._group.send({"kind": "join", "seconds": self._seconds})
        self._group.join(decoder.device, seconds=self._seconds)
        self._replies()

    def sized(self, config: PDConfig, decoder: DecoderSide, other_peak: int) -> tuple[int, int]:
        """Bytes of each rank's KV cache and embeddings: the least that one of them has."""
        self._group.send({"kind": "size", "other_peak": other_peak})
        own = sized(config, decoder, other_peak)
        replies = self._replies()
        return (
            min([own.kv_memory, *(reply["kv_memory"] for reply in replies)]),
            min([own.encoder_cache_memory, *(reply["encoder_cache_memory"] for reply in replies)]),
        )

    def build(self, config: PDConfig, transfer: ECTransferConfig, on_progress: Callable[[], None]) -> None:
        """As `OtherRanks.build`. ConfigError for a connector within this process."""
        if transfer.connector == "memory":
            raise ConfigError(
                "embeddings of --connector memory are in this process, where other ranks cannot read them: "
                "give --connector redis, or --tensor-parallel 1"
            )
        self._progress = ProgressListener(on_progress)
        # Objects of this process; traces are rank 0's business.
        own = ("store", "producers", "direct")
        shown = {one.name: getattr(transfer, one.name) for one in fields(transfer) if one.name not in own}
        message = {
            "kind": "build",
            "kv_memory": config.kv_memory,
            "encoder_cache_memory": config.encoder_cache_memory,
            "transfer": shown,
        }
        for rank in range(1, self.size):
            self._group.send(message, [self._progress.descriptor], to=rank)
        self._progress.handed_out()
        self._replies()

    def send_step(self, message: Message) -> None:
        """Begins a step on all of them; RankLost."""
        self._group.send({"kind": "step", **message})

    def collect_reports(self) -> list[Message]:
        """The reports of the step, in the order of the ranks; RankLost, RankFailed."""
        return self._group.collect(seconds=self._seconds)

    def close(self, *, seconds: float = END_SECONDS) -> None:
        """Ends the processes, by force after `seconds`. Idempotent."""
        self._group.close(seconds=seconds)
        if self._progress is not None:
            self._progress.join()
        leave()

    def _replies(self) -> list[Message]:
        try:
            return self._group.collect()
        except RankFailed as error:
            if error.kind == "ConfigError":
                raise ConfigError(f"rank {error.rank}: {error.text}") from error
            raise


def collective_seconds(stall_timeout: float) -> float:
    """The deadline of collectives and reports, in seconds: longer than a rank may stand still."""
    return max(_COLLECTIVE_SECONDS, 2 * stall_timeout) if stall_timeout else _FOR_EVER_SECONDS
