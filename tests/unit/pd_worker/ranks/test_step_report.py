"""Reports of ranks, and what becomes of rank 0's output with them."""

from __future__ import annotations

import os
import threading

import msgpack
import pytest

from triptych.base.ranks.channel import RankLost
from triptych.ec_connector.base import ECConnectorOutput, FailedLoad
from triptych.pd_worker.core.outputs import ModelRunnerOutput
from triptych.pd_worker.ranks.decoder_ranks import ProgressListener, ProgressWriter
from triptych.pd_worker.ranks.ranked_runner import check_same_step, merge_into
from triptych.pd_worker.ranks.step_message import StepReport, read_report, report_of


def test_a_report_says_what_the_rank_has_done() -> None:
    output = ModelRunnerOutput(
        swapped_out=True,
        swapped_in=False,
        sampled=[5],
        unprojected=frozenset({"k"}),
        non_finite=frozenset({2, 0}),
        batch_digest=-(1 << 62),
        ec_connector_output=ECConnectorOutput(
            fetched={"a": 0.5},
            loaded=["b"],
            failed=[FailedLoad("c", "gone", "d1", unreachable=True)],
            generations={"a": 7},
        ),
    )
    report = read_report(msgpack.unpackb(msgpack.packb(report_of(9, output))))
    assert report == StepReport(
        9, True, False, frozenset({"k"}), frozenset({0, 2}), -(1 << 62), output.ec_connector_output
    )


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("other", [True, False])
def test_copies_have_succeeded_when_they_have_on_all_ranks(own: bool, other: bool) -> None:
    output = ModelRunnerOutput(swapped_out=own, swapped_in=own)
    merge_into(output, [StepReport(1, True, True), StepReport(1, other, other)])
    assert output.swapped_out is output.swapped_in is (own and other)


def test_what_fails_on_any_rank_has_failed() -> None:
    output = ModelRunnerOutput(True, True, sampled=[4], unprojected=frozenset("a"), non_finite=frozenset({1}))
    reports = [
        StepReport(1, True, True, frozenset("b")),
        StepReport(1, True, True, non_finite=frozenset({3})),
    ]
    merge_into(output, reports)
    assert output.unprojected == {"a", "b"}
    assert output.non_finite == {1, 3}
    assert output.sampled == [4], "rank 0 alone samples"


def test_ranks_that_computed_something_else_end_the_worker() -> None:
    output = ModelRunnerOutput(batch_digest=5)
    check_same_step(3, output, [StepReport(3, True, True, batch_digest=5)])
    with pytest.raises(RankLost, match="rank 2 computed another batch"):
        reports = [StepReport(3, True, True, batch_digest=5), StepReport(3, True, True, batch_digest=6)]
        check_same_step(3, output, reports)
    with pytest.raises(RankLost, match="rank 1 reports step 2 in place of 3"):
        check_same_step(3, output, [StepReport(2, True, True, batch_digest=5)])


PATIENCE = 30.0


def test_a_write_wakes_the_listener_and_the_last_writers_end_ends_it() -> None:
    heard = threading.Semaphore(0)
    listener = ProgressListener(heard.release)
    writers = [ProgressWriter(listener.descriptor) for _ in range(2)]
    listener.handed_out()
    for writer in writers:
        writer.write()
        assert heard.acquire(timeout=PATIENCE)
    for writer in writers:
        writer.close()
    listener.join()
    assert not any(thread.name == "rank-progress" for thread in threading.enumerate())


def test_a_writer_never_blocks_and_a_listener_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    writer = ProgressWriter(writing)
    os.close(writing)
    for _ in range(100_000):  # more than a pipe holds
        writer.write()
    os.close(reading)
    writer.write()
    writer.close()
