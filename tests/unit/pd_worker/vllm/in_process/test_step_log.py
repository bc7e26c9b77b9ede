"""Every report of the engine is a step, whatever it says."""

from __future__ import annotations

from types import SimpleNamespace

from triptych.pd_worker.vllm.in_process.step_log import StepLog


def test_steps_are_counted_and_the_last_state_is_kept():
    log = StepLog()
    log.record(SimpleNamespace(kv_cache_usage=0.5), SimpleNamespace(num_preempted_reqs=2))
    log.record(None, SimpleNamespace(num_preempted_reqs=1))
    log.record(SimpleNamespace(kv_cache_usage=0.25), None)
    assert (log.steps, log.kv_cache_usage, log.preemptions) == (3, 0.25, 3)
