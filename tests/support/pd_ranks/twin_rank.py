"""A second rank in this process, with the whole decoder: its KV cache has to become rank 0's, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgpack
import torch

from triptych.base.config import PDConfig
from triptych.base.ranks.channel import Message
from triptych.ec_connector.base import ECConnectorRole, ECTransferConfig
from triptych.models.base import DecoderSide
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.pd_worker.core.outputs import ScheduledChunk
from triptych.pd_worker.ranks.request_mirror import RequestMirror
from triptych.pd_worker.ranks.step_message import report_of
from triptych.pd_worker.runner.capacity import runner_options
from triptych.pd_worker.runner.model_runner import ModelRunner

TWIN_THREAD = "twin-rank"
_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ThreadGroup(TensorParallel):
    """A group whose ranks are two threads; its all-reduce is a barrier."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=_SECONDS))
    sums: list[float] = field(default_factory=list)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        self.sums.append(float(partial))
        self.barrier.wait()
        total = sum(self.sums[-2:])
        self.barrier.wait()
        return torch.tensor([total])


class TwinRank:
    """Rank 1 of two as a thread; see `OtherRanks`. `compared` counts tokens whose keys were compared."""

    size = 2

    def __init__(self, decoder: DecoderSide) -> None:
        self._decoder = decoder
        self.parallel: TensorParallel = ThreadGroup(0, 2)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=TWIN_THREAD)
        self._mirror = RequestMirror(decoder.geometry.position_rows)
        self._report: Future[Message] | None = None
        self._chunks: list[ScheduledChunk] = []
        self.runner: ModelRunner | None = None
        #: Rank 0's, to compare with.
        self.leader: ModelRunner | None = None
        self.compared = 0
        #: Put between a step's report and rank 0, for faults.
        self.alter: Callable[[Message], Message] = lambda report: report

    def build(self, config: PDConfig, transfer: ECTransferConfig, on_progress: Callable[[], None]) -> None:
        group = self.parallel
        assert isinstance(group, ThreadGroup)
        second = ThreadGroup(1, 2, barrier=group.barrier, sums=group.sums)
        self.runner = ModelRunner(self._decoder, **runner_options(config, self._decoder), parallel=second)
        self.runner.ensure_ec_transfer_initialized(transfer, ECConnectorRole.WORKER, on_progress)

    def send_step(self, message: Message) -> None:
        self._report = self._thread.submit(self._step, msgpack.packb(message))

    def _step(self, packed: bytes) -> Message:
        assert self.runner is not None
        scheduled = self._mirror.apply(msgpack.unpackb(packed))
        output = self.runner.execute(scheduled)
        if output.error is not None:
            raise output.error
        self._chunks = scheduled.computable(swapped_in=output.swapped_in)
        report: Message = msgpack.unpackb(msgpack.packb(report_of(scheduled.step, output)))
        return report

    def collect_reports(self) -> list[Message]:
        assert self._report is not None
        report = self._report.result(_SECONDS)
        if self.leader is not None:
            for chunk in self._chunks:
                self._compare(chunk)
        return [self.alter(report)]

    def _compare(self, chunk: ScheduledChunk) -> None:
        """All keys and values that the chunk has written and read are equal on both ranks."""
        assert self.leader is not None and self.runner is not None
        ours, theirs = self.leader.kv_cache, self.runner.kv_cache
        slots = [ours.slots(chunk.block_ids, chunk.end)]
        if chunk.cross_length:
            slots.append(ours.slots(chunk.cross_blocks, chunk.cross_length))
        places = torch.cat(slots)
        for one, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
            assert torch.equal(one.flatten(0, 1)[places], other.flatten(0, 1)[places]), "the ranks differ"
        self.compared += len(places)

    def close(self) -> None:
        self._thread.shutdown(wait=False)
        if self.runner is not None:
            self.runner.shutdown_ec_transfer()
