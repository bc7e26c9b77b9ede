"""Whether vLLM lives: asked regularly, and whenever a call of it fails."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from triptych.base.errors import ConfigError
from triptych.pd_worker.vllm.http.client import EngineInfo, VLLMClient
from triptych.pd_worker.vllm.http.replies import EngineError, EngineRejected, EngineSilent, EngineUnreachable

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
_LOOK_WHILE_DOWN = 0.25
#: Looks in a row that get no answer before the server counts as gone; a refused connection counts at once.
_SILENT_LOOKS = 3
#: For the step by which a server shows that its engine moves.
_PROBE_SECONDS = 30.0
_LOG_SECONDS = 10.0
#: Between two readings of the KV cache's usage: the server's page of metrics takes milliseconds to make.
_KV_SECONDS = 3.0


class EngineHealth:
    """The server's life. It is `up` from a step that it has made until it does not answer any more.

    A server that answers but gives no token and makes no step for `stall_timeout` seconds, while requests
    are at work in it, is not up either.
    """

    def __init__(self, client: VLLMClient, stall_timeout: float) -> None:
        self.up = False
        self.info: EngineInfo | None = None
        #: The fraction of its KV cache that was in use when requests were last seen at work in it.
        self.kv_usage = 0.0
        self._kv_read_at = -math.inf
        self._client = client
        self._stall_timeout = stall_timeout
        self._on_lost: Callable[[], None] = lambda: None
        self._working: Callable[[], bool] = lambda: False
        self._progress_at = time.monotonic()
        self._steps = b""
        self._silent = 0
        self._looking: asyncio.Task[None] | None = None
        self._complained_at = 0.0

    @property
    def speculates(self) -> bool:
        """Whether the server decodes speculatively, by what it last said."""
        return self.info is not None and self.info.speculates

    def watch(self, on_lost: Callable[[], None], working: Callable[[], bool]) -> None:
        """From now on calls `on_lost` when the server goes; `working`: requests are at work in it."""
        self._on_lost, self._working = on_lost, working

    def note_progress(self) -> None:
        """The server has given a token."""
        self._progress_at = time.monotonic()

    async def first_answer(self) -> EngineInfo:
        """Waits for the server, however long that takes. ConfigError for one that cannot be used."""
        while True:
            try:
                info = await self._client.info()
                check_version(info.version)
                await self._client.probe(_PROBE_SECONDS)
                self.info, self.up = info, True
                return info
            except EngineRejected as error:
                raise ConfigError(_unusable(error, pools=self._client.pools)) from error
            except EngineError as error:
                self._complain(f"waiting for vLLM: {error}")
            await asyncio.sleep(LOOK_SECONDS)

    async def run(self) -> None:
        """Looks after the server until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(LOOK_SECONDS if self.up else _LOOK_WHILE_DOWN)

    async def poll(self) -> bool:
        """Asks the server now, or hears of a look under way: whether it is up."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="vllm health")
        await asyncio.shield(self._looking)
        return self.up

    async def _look(self) -> None:
        try:
            await self._ask()
            self._silent = 0
            if not self.up:
                await self._return()
            elif await self._stalled():
                self._go(f"it has made no step for {self._stall_timeout:g} s")
            elif self._working() and time.monotonic() >= self._kv_read_at + _KV_SECONDS:
                self._kv_read_at = time.monotonic()
                self.kv_usage = await self._client.kv_usage()
        except EngineUnreachable as error:
            self._silent += 1
            if not isinstance(error, EngineSilent) or self._silent >= _SILENT_LOOKS:
                self._go(str(error))
        except EngineError as error:
            self._go(str(error))
        except Exception:
            logger.exception("vLLM could not be asked")

    async def _ask(self) -> None:
        """Returns where the server lives; a connection that breaks is made a second time."""
        try:
            await self._client.check_health()
        except EngineSilent:
            raise
        except EngineUnreachable:
            # A connection that was kept open may be closed at the moment when it is used again.
            await self._client.check_health()

    def _go(self, why: str) -> None:
        if self.up:
            logger.warning("vLLM has gone: %s", why)
            self.up = False
            self._on_lost()
        else:
            self._complain(f"vLLM is still away: {why}")

    async def _return(self) -> None:
        """The server answers again: it is up if it is the same model's, and generates a token."""
        info = await self._client.info()
        known = self.info
        if known is not None and (info.root != known.root or info.max_model_len < known.max_model_len):
            self._complain(
                f"vLLM has come back with {info.root} and {info.max_model_len} tokens, this worker was "
                f"started for {known.root} and {known.max_model_len}: restart it, or vLLM"
            )
            return
        if known is not None and (gone := sorted(set(known.adapters) - set(info.adapters))):
            self._complain(f"vLLM has come back without the LoRA adapter {gone[0]}: start it with that one")
            return
        await self._client.probe(_PROBE_SECONDS)
        logger.info("vLLM is back")
        self.info = info
        self.note_progress()
        self.up = True

    async def _stalled(self) -> bool:
        """Whether requests are at work, and neither a token nor a step has been seen for too long."""
        if not self._stall_timeout or not self._working():
            self.note_progress()
            return False
        still = time.monotonic() - self._progress_at
        if still < self._stall_timeout / 2:
            return False
        # A long prompt is prefilled without a token.
        steps = await self._client.steps()
        if steps != self._steps:
            self._steps = steps
            self.note_progress()
            return False
        return still >= self._stall_timeout

    def _complain(self, text: str) -> None:
        now = time.monotonic()
        if now - self._complained_at >= _LOG_SECONDS:
            self._complained_at = now
            logger.warning("%s", text)


#: Releases whose endpoint is the one that is used here.
VERSIONS = ("0.32", "0.33")


def check_version(version: str) -> None:
    """ConfigError for a release of vLLM that is not known to work."""
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise ConfigError(
            f"--engine-url: the server is vLLM {version}, this worker knows {' and '.join(VERSIONS)}: "
            "start one of these"
        )


def _unusable(error: EngineRejected, *, pools: bool) -> str:
    flag = "--runner pooling, since MODEL is for embeddings or scores," if pools else "--enable-scale-out"
    remedy = {
        401: "give the key of its --api-key by --engine-key-file",
        403: f"start it with {flag}",
        404: f"start it with {flag} and give its root as --engine-url",
    }.get(error.status, "see its log")
    return f"--engine-url: the server refuses this worker's calls ({error}): {remedy}"
