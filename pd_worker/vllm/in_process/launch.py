"""The life of an engine in this process: started in a thread, and ended with all of its processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

from triptych.config import PDConfig
from triptych.errors import ConfigError
from triptych.integrations.vllm.versions import check_installed
from triptych.pd_worker.vllm.in_process.arguments import engine_arguments
from triptych.progress.progress import step
from triptych.watchdog import ENGINE_EXIT

if TYPE_CHECKING:
    from triptych.pd_worker.vllm.in_process.async_client import AsyncLLMClient

logger = logging.getLogger(__name__)

#: Between two looks for processes of an engine whose start is given up, and how long that may take.
_LOOK_SECONDS = 0.2
_GIVE_UP_SECONDS = 30.0
#: What vLLM reads from the environment, unless that says otherwise: this process has threads, which a fork
#: does not copy, and nothing of it is reported to vLLM's makers.
_ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}


def check_vllm() -> None:
    """ConfigError, with the remedy, where this environment has no vLLM that is supported."""
    try:
        check_installed()
    except ConfigError as error:
        raise ConfigError(
            f"--engine vllm without --engine-url runs vLLM in this process: {error}; or give --engine-url, "
            "the address of a running `vllm serve`"
        ) from error


async def started_engine(config: PDConfig, namespace: str, stop: asyncio.Event) -> AsyncLLMClient | None:
    """The engine, once it can serve; None where `stop` is set before. ConfigError where it cannot start."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    arguments = engine_arguments(config, namespace)
    given_up = threading.Event()

    def start() -> AsyncLLMClient | None:
        # Imports of vLLM take seconds.
        from triptych.pd_worker.vllm.in_process.start import engine_config, start_engine

        vllm_config = engine_config(arguments)
        with sigint_blocked():
            return None if given_up.is_set() else start_engine(vllm_config)

    with step("start vLLM"):
        starting = asyncio.create_task(asyncio.to_thread(start))
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if not stop.is_set():
            return await starting
        given_up.set()
        await _give_up(starting)
        return None


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Processes that this thread starts do not hear Ctrl-C: they would end requests that this one drains."""
    # Its start would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _give_up(starting: asyncio.Task[AsyncLLMClient | None]) -> None:
    """Ends a start: without its processes it fails."""
    logger.info("stopped while vLLM was starting")
    deadline = asyncio.get_running_loop().time() + _GIVE_UP_SECONDS
    while not starting.done():
        kill_engine()
        await asyncio.wait((starting,), timeout=_LOOK_SECONDS)
        if asyncio.get_running_loop().time() > deadline:
            logger.error("vLLM's start does not end: this process ends without it")
            os._exit(ENGINE_EXIT)
    with contextlib.suppress(ConfigError):
        if (client := await starting) is not None:
            await client.close()


def kill_engine() -> None:
    """Kills the processes of the engine, which may hang."""
    for process in multiprocessing.active_children():
        process.kill()


def end_without_engine() -> None:
    """Ends this process at once, for a supervisor to start it anew; proxies see a lost worker."""
    kill_engine()
    logger.critical("the vLLM engine is lost: this process ends, its requests go on elsewhere")
    os._exit(ENGINE_EXIT)
