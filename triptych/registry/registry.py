"""The registry of live workers and proxies, the only way in which processes find each other, and heartbeats.

A hash of the workers and sorted sets of deadlines in ms of the server's clock, without a TTL (see `keys`). A
worker's value is its incarnation, a line end, and the WorkerInfo as msgpack. A heartbeat keeps a
registration through outages; pings tell whether the store answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from triptych.base.engine_beat import StallClock
from triptych.base.types import WorkerInfo, prepared
from triptych.store import keys
from triptych.store.control import NOW, StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

#: Seconds that a registration lasts unless it is renewed.
TERM = 5.0

# An unchanged registration does not change the version, so that proxies need not read the workers again.
REGISTER = (
    NOW
    + """
local name, term, value = ARGV[1], ARGV[2], ARGV[3]
local deadline = tonumber(redis.call('ZSCORE', KEYS[2], name) or '0')
if deadline <= now or redis.call('HGET', KEYS[1], name) ~= value then
  redis.call('HSET', KEYS[1], name, value)
  redis.call('INCR', KEYS[3])
end
redis.call('ZADD', KEYS[2], string.format('%.0f', now + term), name)
return 1
"""
)

# Only its own registration: a later worker at the same address stays registered.
WITHDRAW = """
local value = redis.call('HGET', KEYS[1], ARGV[1])
local mark = ARGV[2] .. '\\n'
if not value or string.sub(value, 1, #mark) ~= mark then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('INCR', KEYS[3])
return redis.call('HDEL', KEYS[1], ARGV[1])
"""

_LIVE = """
local function live(after)
  local found = {}
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], after, '+inf')) do
    local value = redis.call('HGET', KEYS[1], name)
    if value then found[#found + 1] = value end
  end
  return found
end
local after = string.format('(%.0f', now)
"""

LIVE_WORKERS = NOW + _LIVE + "return live(after)"

DECLARE = NOW + "return redis.call('ZADD', KEYS[1], string.format('%.0f', now + ARGV[2]), ARGV[1])"

COUNT_PROXIES = NOW + "return redis.call('ZCOUNT', KEYS[1], string.format('(%.0f', now), '+inf')"

# Within one version workers can only expire: version and number of live workers identify the state.
LOOK = (
    NOW
    + _LIVE
    + """
local proxy, term, word, known = unpack(ARGV)
redis.call('SET', KEYS[5], word, 'NX')
local epoch = redis.call('GET', KEYS[5])
redis.call('ZADD', KEYS[4], string.format('%.0f', now + term), proxy)
local proxies = redis.call('ZCOUNT', KEYS[4], after, '+inf')
local version = redis.call('GET', KEYS[3]) or '0'
local mark = epoch .. ' ' .. version .. ' ' .. redis.call('ZCOUNT', KEYS[2], after, '+inf')
if mark == known then return {mark, epoch, proxies} end
return {mark, epoch, proxies, live(after)}
"""
)

COLLECT = (
    NOW
    + """
local limit = string.format('%.0f', now - ARGV[1])
local dead = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', limit)
for _, name in ipairs(dead) do redis.call('HDEL', KEYS[1], name) end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', limit)
return #dead + redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', limit)
"""
)

WORKER_KEYS = [keys.WORKERS, keys.WORKER_DEADLINES, keys.VERSION]


@dataclass(frozen=True, slots=True)
class RegistrySnapshot:
    """A snapshot of the registry.

    `workers` is None when they have not changed since the snapshot whose `mark` was given. `epoch` changes
    when the store is flushed or restarted.
    """

    mark: str
    epoch: str
    proxies: int
    workers: list[WorkerInfo] | None


class Registry:
    """The registry in the store. Every method raises StoreUnavailable when the store is down."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._control = store.control

    async def register(self, info: WorkerInfo, term: float = TERM) -> None:
        """Registers the worker for `term` seconds; replaces one of its pool at this address."""
        await self._control.script(REGISTER, WORKER_KEYS, _field(info), int(term * 1000), _value(info))

    async def withdraw(self, info: WorkerInfo) -> None:
        """Deletes the worker's registration, but not a later worker's at its address. Idempotent."""
        await self._control.script(WITHDRAW, WORKER_KEYS, _field(info), info.incarnation)

    async def workers(self) -> list[WorkerInfo]:
        """The live workers, by pool and address."""
        return _infos(await self._control.script(LIVE_WORKERS, WORKER_KEYS))

    async def poll(self, proxy_id: str, term: float = TERM, *, mark: str = "") -> RegistrySnapshot:
        """A snapshot for a proxy, by one command that also declares the proxy for `term` seconds.

        Its cost depends on the number of workers only if they have changed since `mark`.
        """
        reply = await self._control.script(
            LOOK,
            [*WORKER_KEYS, keys.PROXIES, keys.EPOCH],
            proxy_id,
            int(term * 1000),
            uuid.uuid4().hex,
            mark,
        )
        workers = _infos(reply[3]) if len(reply) > 3 else None
        epoch = self._store.epoch_with(reply[1].decode())
        return RegistrySnapshot(reply[0].decode(), epoch, int(reply[2]), workers)

    async def declare_proxy(self, proxy_id: str, term: float = TERM) -> None:
        """Declares a live proxy for `term` seconds."""
        await self._control.script(DECLARE, [keys.PROXIES], proxy_id, int(term * 1000))

    async def proxies(self) -> int:
        """The number of live proxies."""
        return int(await self._control.script(COUNT_PROXIES, [keys.PROXIES]))

    async def collect_dead(self, older_than: float = keys.DEAD_AFTER) -> int:
        """Deletes registrations that expired more than `older_than` seconds ago; returns their number."""
        names = [keys.WORKERS, keys.WORKER_DEADLINES, keys.PROXIES]
        return int(await self._control.script(COLLECT, names, int(older_than * 1000)))


def _infos(values: list[bytes]) -> list[WorkerInfo]:
    infos = (_unpack(value) for value in values)
    return sorted((info for info in infos if info is not None), key=lambda i: (i.pool, i.address))


def _field(info: WorkerInfo) -> str:
    return f"{info.pool} {info.address}"


def _value(info: WorkerInfo) -> bytes:
    return info.incarnation.encode() + b"\n" + _pack(info)


def _pack(info: WorkerInfo) -> bytes:
    return msgspec.msgpack.encode(info.written)


def _unpack(raw: bytes) -> WorkerInfo | None:
    """A registration's WorkerInfo; None, with a log line, for one that Triptych has not written."""
    try:
        fields = msgspec.msgpack.decode(raw.partition(b"\n")[2], type=dict[str, object])
        # Of a later release: msgspec would leave out what it does not know.
        if not fields.keys() - WorkerInfo.__dataclass_fields__.keys():
            return msgspec.convert(fields, prepared(WorkerInfo))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    logger.warning("a registration of %d bytes cannot be read", len(raw))
    return None


#: Seconds between two registrations: two come within a term, so that one may be lost. What dies is not found
#: by this but by its connections, and by a health check as soon as the term is over.
INTERVAL = 2.0


class Heartbeat:
    """A task that registers `info` every `interval` seconds until stopped, in one event loop.

    `renewed` gives it as it is now; pool, address and incarnation stay. While the worker is not `healthy` its
    registration is not renewed, and lapses.
    """

    def __init__(
        self,
        registry: Registry,
        info: WorkerInfo,
        interval: float = INTERVAL,
        healthy: Callable[[], bool] = lambda: True,
        renewed: Callable[[WorkerInfo], WorkerInfo] = lambda info: info,
    ) -> None:
        self.info = info
        self._renewed = renewed
        self._healthy = healthy
        self._registry = registry
        self._interval = interval
        self._task: asyncio.Task[None] | None = None
        self._reachable = True
        self._stopping = False

    def degraded(self) -> tuple[str, ...]:
        """What the worker lacks: the store, while it cannot register. Any thread may ask."""
        return () if self._reachable else ("store",)

    def start(self) -> None:
        """Registers at once and starts the task. Idempotent."""
        if self._task is None:
            self._stopping = False
            self._task = asyncio.get_running_loop().create_task(self._beat(), name="heartbeat")

    async def stop(self, withdraw: bool = True) -> None:
        """Ends the task, and withdraws the registration if the store can be reached. Idempotent."""
        if self._task is None:
            return
        # A cancellation that meets a store command may come back as StoreUnavailable: the flag ends the beat.
        self._stopping = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        if withdraw:
            try:
                await self._registry.withdraw(self.info)
            except StoreUnavailable as error:
                logger.warning("the registration could not be withdrawn and will expire: %s", error)

    async def _beat(self) -> None:
        while not self._stopping:
            if self._healthy():
                try:
                    await self._register()
                except Exception:
                    # The next one may succeed; if the task ended, new proxies would never find this worker.
                    logger.exception("a registration failed")
            await asyncio.sleep(self._interval)

    async def _register(self) -> None:
        try:
            await self._registry.register(self._renewed(self.info))
        except StoreUnavailable as error:
            if self._reachable:
                logger.warning("cannot register, trying again: %s", error)
            self._reachable = False
        else:
            if not self._reachable:
                logger.info("registered again as %s %s", self.info.pool, self.info.address)
            self._reachable = True


#: Seconds between two pings, and how long one waits for its answer.
PING_INTERVAL = 0.25
PING_SECONDS = 0.6
#: Seconds without an answer after which the store is out of reach; more than one ping of a slow process.
SILENCE_SECONDS = 1.25
#: Shortest wait for an answer that is not needed.
HURRY_SECONDS = 0.05


class StoreReach:
    """Pings the store inside `async with`, in one event loop.

    `tell` hears of every change, `while_lost` is called after every ping while the store is out of reach.
    """

    def __init__(
        self,
        ping: Callable[[], Awaitable[bool]],
        tell: Callable[[bool], Awaitable[None]],
        while_lost: Callable[[], None],
    ) -> None:
        self._ping = ping
        self._tell = tell
        self._while_lost = while_lost
        self._answers = self._lost_at = 0
        self._clock = StallClock(PING_INTERVAL + PING_SECONDS, SILENCE_SECONDS)
        self._task: asyncio.Task[None] | None = None
        self.reaches = True

    async def __aenter__(self) -> StoreReach:
        await self._tell(True)
        self._task = asyncio.create_task(self._run(), name="store reach")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_SECONDS):
                    self._answers += await self._ping()
            try:
                await self._look(asyncio.get_running_loop().time())
            except Exception:
                logger.exception("what follows from the store's silence could not be carried out")
            await asyncio.sleep(PING_INTERVAL)

    async def _look(self, now: float) -> None:
        reaches = self._clock.poll(self._answers, now) < SILENCE_SECONDS
        # After a pause of this process the clock starts again: only an answer brings a store back.
        reaches = reaches and (self.reaches or self._answers > self._lost_at)
        if reaches is not self.reaches:
            self.reaches = reaches
            if reaches:
                logger.info("the store answers again")
            else:
                self._lost_at = self._answers
                logger.warning("the store is out of reach: what needs it goes on elsewhere")
            await self._tell(reaches)
        if not reaches:
            self._while_lost()


class StorePatience:
    """Bounds waits for the store's answers where work goes on without them, in one event loop."""

    def __init__(self) -> None:
        self._usual = 0.0
        self._silent_until = 0.0

    @asynccontextmanager
    async def asked(self, seconds: float, *, hurry: bool) -> AsyncIterator[None]:
        """TimeoutError after `seconds`.

        In a hurry after a few times what answers took lately, and at once after a call that has had none.
        """
        now = asyncio.get_running_loop().time
        began = now()
        if hurry:
            seconds = min(seconds, max(HURRY_SECONDS, 4 * self._usual))
            if began < self._silent_until:
                raise TimeoutError
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            self._silent_until = now() + SILENCE_SECONDS
            raise
        self._usual = max(now() - began, 0.9 * self._usual)
