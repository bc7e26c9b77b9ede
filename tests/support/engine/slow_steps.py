"""An engine whose steps take long."""

from __future__ import annotations

import time
from collections.abc import Callable

from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.engine import Engine

STEP_SECONDS = 0.02


def slow_steps(engine: Engine) -> Callable[[], None]:
    """Makes every step take at least STEP_SECONDS, until what is returned is called.

    A tiny model's answer of hundreds of tokens would else have ended before a busy machine comes to act.
    """
    runner = engine.runner
    execute = runner.execute
    hurries = False

    def slowly(scheduled: SchedulerOutput) -> ModelRunnerOutput:
        if not hurries:
            time.sleep(STEP_SECONDS)
        return execute(scheduled)

    def hurry() -> None:
        nonlocal hurries
        hurries = True

    runner.execute = slowly  # type: ignore[method-assign]
    return hurry
