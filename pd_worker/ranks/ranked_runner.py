"""The model runner of rank 0: sends each step to the other ranks, runs its share, merges the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Unpack

from triptych.base.config import PDConfig
from triptych.base.ranks.channel import Message, RankLost
from triptych.ec_connector.base import ECConnectorOutput, ECTransferConfig, FailedLoad
from triptych.ec_connector.metadata import LoadId, TransferMetadata
from triptych.models.base import DecoderSide
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.ranks.step_message import StepEncoder, StepReport, read_report
from triptych.pd_worker.runner.capacity import RunnerOptions
from triptych.pd_worker.runner.model_runner import ModelRunner


@dataclass(slots=True)
class _Fetch:
    """One load: the ranks that have its host copy, and the longest that one of them took."""

    fetched: set[int] = field(default_factory=set)
    seconds: float = 0.0
    failed: bool = False


@dataclass(slots=True)
class _Move:
    """A host copy's move into the encoder caches: the ranks that have it there."""

    generation: int
    loaded: set[int] = field(default_factory=set)


class TransferMerger:
    """The transfers that are under way on the `size` ranks of a worker.

    Every load and every move is reported once, as by one rank. A rank's entry in its encoder cache of a move
    that failed elsewhere is reported as loaded one step after the failure: the scheduler, which has no entry
    for it by then, evicts it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._fetches: dict[LoadId, _Fetch] = {}
        self._moves: dict[str, _Move] = {}
        #: Entries of failed moves, to be reported with the next step.
        self._stray: set[str] = set()

    def __len__(self) -> int:
        """Loads and moves that are known."""
        return len(self._fetches) + len(self._moves)

    def begin(self, orders: TransferMetadata) -> None:
        """Notes the orders of a step, before the reports on it are merged."""
        for load_id in orders.drops:
            self._fetches.pop(load_id, None)
        for fetch in orders.fetches:
            self._fetches[fetch.load_id] = _Fetch()
        for load_id in orders.moves:
            self._moves[load_id.mm_hash] = _Move(load_id.generation)

    def merge(self, outputs: Sequence[ECConnectorOutput]) -> ECConnectorOutput:
        """The worker's report of the ranks' reports, which are in the order of the ranks."""
        merged = ECConnectorOutput()
        stray, self._stray = self._stray, set()
        merged.loaded.extend(key for key in sorted(stray) if key not in self._moves)
        merged.paths = outputs[0].paths if outputs else {}
        for rank, output in enumerate(outputs):
            merged.saved.extend(output.saved)
            merged.unsaved.update(output.unsaved)
            for key, seconds in output.fetched.items():
                self._fetched(rank, key, seconds, output.generations.get(key), merged)
            for key in output.loaded:
                self._loaded(rank, key, merged)
        # After what has succeeded: a key must never be loaded and failed in one report.
        for output in outputs:
            for failure in output.failed:
                self._failed(failure, output.generations.get(failure.mm_hash), merged)
        return merged

    def _fetched(
        self, rank: int, key: str, seconds: float, generation: int | None, merged: ECConnectorOutput
    ) -> None:
        load = self._fetches.get(LoadId(key, generation or 0))
        if load is None or load.failed:
            return
        load.fetched.add(rank)
        load.seconds = max(load.seconds, seconds)
        if len(load.fetched) == self._size:
            merged.fetched[key] = load.seconds
            merged.generations[key] = generation or 0

    def _loaded(self, rank: int, key: str, merged: ECConnectorOutput) -> None:
        move = self._moves.get(key)
        if move is None:
            # A move that failed on another rank, or that the scheduler has given up: its entry is stray.
            merged.loaded.append(key)
            return
        move.loaded.add(rank)
        if len(move.loaded) == self._size:
            del self._moves[key]
            merged.loaded.append(key)

    def _failed(self, failure: FailedLoad, generation: int | None, merged: ECConnectorOutput) -> None:
        key = failure.mm_hash
        load = self._fetches.get(LoadId(key, generation or 0))
        move = self._moves.get(key)
        if move is not None and move.generation == generation:
            del self._moves[key]
            if move.loaded:
                self._stray.add(key)
        elif load is None or load.failed:
            return  # Another rank's failure of this load is reported already.
        if load is not None:
            load.failed = True
        merged.failed.append(failure)
        merged.generations[key] = generation or 0


class OtherRanks(Protocol):
    """The other ranks of a worker, from the step's point of view."""

    #: Ranks of the worker, rank 0 included.
    size: int
    parallel: TensorParallel

    def build(self, config: PDConfig, transfer: ECTransferConfig, on_progress: Callable[[], None]) -> None:
        """Makes their runners and connectors; `config` is a rank's share, with its sizes found.

        `on_progress` is called, from any thread, when a transfer of one of them may have finished.
        """
        ...

    def send_step(self, message: Message) -> None:
        """Begins a step on all of them."""
        ...

    def collect_reports(self) -> list[Message]:
        """The reports of the step, in the order of the ranks."""
        ...

    def close(self) -> None:
        """Ends them. Idempotent."""
        ...


class RankedRunner(ModelRunner):
    """A model runner of R ranks: an item is loaded once it is on all of them, and failed with any.

    Whatever else than a transfer or a copy fails on a rank ends the worker by RankLost: nobody knows which
    collectives the others wait in. Its requests go on elsewhere.
    """

    def __init__(self, decoder: DecoderSide, ranks: OtherRanks, **options: Unpack[RunnerOptions]) -> None:
        super().__init__(decoder, parallel=ranks.parallel, **options)
        self._ranks = ranks
        self._encoder = StepEncoder()
        self._transfers = TransferMerger(ranks.size)

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """As `ModelRunner.execute`, on all ranks; RankLost where one of them fails."""
        try:
            return self._execute(scheduled)
        except Exception as error:
            raise RankLost(f"step {scheduled.step} failed on one rank: {error}") from error

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        self._ranks.send_step(self._encoder.encode(scheduled))
        if isinstance(scheduled.ec_connector_metadata, TransferMetadata):
            self._transfers.begin(scheduled.ec_connector_metadata)
        output = super().execute(scheduled)
        if output.error is not None:
            raise output.error
        reports = [read_report(message) for message in self._ranks.collect_reports()]
        check_same_step(scheduled.step, output, reports)
        merge_into(output, reports)
        transfers = [output.ec_connector_output, *(report.transfers for report in reports)]
        output.ec_connector_output = self._transfers.merge(transfers)
        return output

    def shutdown_ec_transfer(self) -> None:
        """Ends the other ranks, too. Idempotent."""
        super().shutdown_ec_transfer()
        self._ranks.close()


def merge_into(output: ModelRunnerOutput, reports: Sequence[StepReport]) -> None:
    """Rank 0's output becomes the worker's: copies have succeeded on all ranks, failures are those of any."""
    output.swapped_out = output.swapped_out and all(report.swapped_out for report in reports)
    output.swapped_in = output.swapped_in and all(report.swapped_in for report in reports)
    output.unprojected = output.unprojected.union(*(report.unprojected for report in reports))
    output.non_finite = output.non_finite.union(*(report.non_finite for report in reports))


def check_same_step(step: int, output: ModelRunnerOutput, reports: Sequence[StepReport]) -> None:
    """RankLost unless all ranks have computed the same batch of the same step."""
    for rank, report in enumerate(reports, 1):
        if report.step != step:
            raise RankLost(f"rank {rank} reports step {report.step} in place of {step}")
        if report.batch_digest != output.batch_digest:
            raise RankLost(f"rank {rank} computed another batch than rank 0 in step {step}")
