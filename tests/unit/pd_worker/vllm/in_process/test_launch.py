"""The engine's processes end with the worker, and not before it."""

from __future__ import annotations

import multiprocessing
import signal
import time
from pathlib import Path

from triptych.pd_worker.vllm.in_process.launch import kill_engine, sigint_blocked


def blocks_sigint(pid: int | None) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def test_an_engine_does_not_hear_ctrl_c_and_is_killed():
    engine = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
    with sigint_blocked():
        engine.start()
    assert blocks_sigint(engine.pid) and not blocks_sigint(multiprocessing.current_process().pid)
    kill_engine()
    engine.join(20)
    assert engine.exitcode == -signal.SIGKILL
    engine.close()
