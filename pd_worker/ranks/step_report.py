"""A rank's report of its step, as a message to rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from triptych.base.ranks.channel import Message
from triptych.ec_connector.base import ECConnectorOutput, FailedLoad
from triptych.pd_worker.core.outputs import ModelRunnerOutput


@dataclass(frozen=True, slots=True)
class StepReport:
    """What rank 0 has to know of another rank's step; no tokens, since only rank 0 samples."""

    step: int
    swapped_out: bool
    swapped_in: bool
    unprojected: frozenset[str] = frozenset()
    #: Indices of computed chunks, as in ModelRunnerOutput.
    non_finite: frozenset[int] = frozenset()
    #: Digest of the batch that the rank computed: all ranks must have computed the same.
    batch_digest: int = 0
    transfers: ECConnectorOutput = field(default_factory=ECConnectorOutput)


def report_of(step: int, output: ModelRunnerOutput) -> Message:
    """The report of a rank whose step gave `output`."""
    moved = output.ec_connector_output
    return {
        "step": step,
        "swapped_out": output.swapped_out,
        "swapped_in": output.swapped_in,
        "unprojected": sorted(output.unprojected),
        "non_finite": sorted(output.non_finite),
        "batch_digest": output.batch_digest,
        "fetched": moved.fetched,
        "loaded": moved.loaded,
        "failed": list(map(astuple, moved.failed)),
        "generations": moved.generations,
    }


def read_report(message: Message) -> StepReport:
    """The report in a message; KeyError for another message."""
    failed: Sequence[tuple[str, str, str, bool]] = message["failed"]
    return StepReport(
        step=message["step"],
        swapped_out=message["swapped_out"],
        swapped_in=message["swapped_in"],
        unprojected=frozenset(message["unprojected"]),
        non_finite=frozenset(message["non_finite"]),
        batch_digest=message["batch_digest"],
        transfers=ECConnectorOutput(
            fetched=message["fetched"],
            loaded=message["loaded"],
            failed=[FailedLoad(*failure) for failure in failed],
            generations=message["generations"],
        ),
    )
