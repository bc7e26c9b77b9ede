"""The model runner of rank 0: sends each step to the other ranks, runs its share, merges the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from triptych.base.config import PDConfig
from triptych.base.ranks.channel import Message
from triptych.base.ranks.errors import RankLost
from triptych.ec_connector.base import ECTransferConfig
from triptych.ec_connector.metadata import TransferMetadata
from triptych.models.base import DecoderSide
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.ranks.step_message import StepEncoder
from triptych.pd_worker.ranks.step_report import StepReport, read_report
from triptych.pd_worker.ranks.transfer_merger import TransferMerger
from triptych.pd_worker.runner.model_runner import ModelRunner


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

    def __init__(
        self,
        decoder: DecoderSide,
        ranks: OtherRanks,
        *,
        num_blocks: int,
        block_size: int,
        backend: str = "sdpa",
        num_host_blocks: int = 0,
        spare_block: bool = False,
        num_slots: int = 0,
        num_host_slots: int = 0,
    ) -> None:
        super().__init__(
            decoder,
            num_blocks=num_blocks,
            block_size=block_size,
            backend=backend,
            num_host_blocks=num_host_blocks,
            spare_block=spare_block,
            parallel=ranks.parallel,
            num_slots=num_slots,
            num_host_slots=num_host_slots,
        )
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
