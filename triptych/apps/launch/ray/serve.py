"""`triptych serve --launcher ray`: from a config to actors that are supervised until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from triptych.apps.launch.cluster_state import (
    answers_ready,
    registered,
    remove_state,
    run_folder,
    write_state,
)
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.apps.launch.greeting import greeting
from triptych.apps.launch.model_path import DEMO_MODEL, model_name, resolve_demo, resolve_model
from triptych.apps.launch.ray.connection import (
    RayActors,
    check_installed,
    connect,
    disconnect,
    namespace_of,
    node_ip,
)
from triptych.apps.launch.ray.flags import (
    check_cluster_name,
    check_secrets,
    check_shared,
    with_files,
    with_own_files,
)
from triptych.apps.launch.ray.pools import ActorPool, plan_actors
from triptych.apps.launch.ray.supervisor import ActorSupervisor, DesiredActors
from triptych.apps.launch.scaling import follow_decisions
from triptych.apps.launch.secrets import forget_variables, store_url
from triptych.base.config import ServeConfig, check_scaled, front_door_tls, is_loopback
from triptych.base.errors import ConfigError
from triptych.base.log import setup_logging
from triptych.base.machine.resources import usable_cpus
from triptych.models.checkpoint.first_checks import check_encoder_model, check_pd_model

logger = logging.getLogger("launch")

#: Seconds between two polls of Ray, the board and the registry.
_INTERVAL = 0.5
_REPORT_SECONDS = 10.0
#: Threads that calls to Ray may block: as many drains run at once.
_THREADS = 64


class ServeLoop:
    """Watches over the actors of one cluster until SIGINT or SIGTERM. `config` has the store's address."""

    def __init__(
        self,
        config: ServeConfig,
        actors: ActorSupervisor,
        pools: Mapping[str, ActorPool],
        run_dir: Path,
        own_store: EmbeddedStore | None,
    ) -> None:
        self._config = config
        self._actors = actors
        self._pools = pools
        self._run_dir = run_dir
        self._own_store = own_store
        self._desired = DesiredActors(pools, lambda: actors.draining)
        self._scaled = {pool.target: pool.size for pool in pools.values() if pool.size.scaled}
        self._stop = asyncio.Event()
        self._greeted = False

    async def run(self) -> int:
        """The exit code. What Ray has of the cluster is gone afterwards."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="ray"))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        await self._actors.claim()
        scaling: asyncio.Task[None] | None = None
        try:
            self._desired.keep(await self._actors.adopt())
            if self._scaled:
                follow = follow_decisions(self._config.store, self._scaled, self._desired)
                scaling = asyncio.create_task(follow)
            await self._until_stopped()
        finally:
            logger.info("stopping")
            if scaling is not None:
                scaling.cancel()
                await asyncio.gather(scaling, return_exceptions=True)
            await self._actors.stop()
            remove_state(self._run_dir)
            logger.info("stopped")
        return 0

    async def _until_stopped(self) -> None:
        deadline, report = time.monotonic() + self._config.ray.start_timeout, time.monotonic()
        while not self._stop.is_set():
            try:
                await self._step()
            except ConfigError:
                raise
            except Exception as error:
                # Ray's own errors are many; the actors go on, and the next step asks again.
                logger.warning("Ray does not answer: %s: %s", type(error).__name__, error)
            if not self._greeted and time.monotonic() > report:
                report = time.monotonic() + _REPORT_SECONDS
                await self._report(give_up=time.monotonic() > deadline)
            try:
                await asyncio.wait_for(self._stop.wait(), _INTERVAL)
            except TimeoutError:
                continue

    async def _step(self) -> None:
        if self._own_store is not None:
            await self._own_store.keep_running()
        await self._actors.reconcile(self._desired.names)
        self._write_processes()
        for name, state in self._actors.states.items():
            if state["state"] == "failed":
                await self._failed(name, f"{name} on {state['node']}: {state['message']}")
        if not self._greeted and await self._ready():
            self._greeted = True
            sys.stdout.write(greeting(self._as_reached()))
            sys.stdout.flush()

    async def _failed(self, name: str, reason: str) -> None:
        """Before the cluster answers that is the end; later it is one node's trouble."""
        if not self._greeted:
            raise ConfigError(reason)
        logger.error("%s; it starts again in a while", reason)
        await self._actors.restart_failed(name)

    async def _report(self, give_up: bool) -> None:
        waiting = await self._actors.waiting()
        counts = sorted((await registered(self._config.store)).items())
        there = ", ".join(f"{pool}: {count}" for pool, count in counts) or "none"
        text = f"registered: {there}" + (f"; no resources yet for {waiting}" if waiting else "")
        if give_up:
            raise ConfigError(
                f"--start-timeout {self._config.ray.start_timeout:g} s are over; {text}. "
                "Add nodes, or lower --ray-resources or the numbers of workers"
            )
        logger.info("%s", text)

    async def _ready(self) -> bool:
        """Whether as many workers as the cluster always has are registered, and all proxies answer."""
        counts = await registered(self._config.store)
        if any(counts.get(pool, 0) < size.minimum for pool, size in self._config.pools.items()):
            return False
        proxies = [self._proxy_address(name) for name in self._pools["proxy"].names(self._config.ray.proxies)]
        tls = front_door_tls(self._config.proxy) is not None
        return all([address and await answers_ready(*address, tls=tls) for address in proxies])

    def _proxy_address(self, name: str) -> tuple[str, int] | None:
        """Where this machine reaches a proxy; None while it has no place."""
        state = self._actors.states.get(name)
        if state is None:
            return None
        host = self._config.proxy.host
        own = host if is_loopback(host) else state["node"]
        return own, self._pools["proxy"].port_of(name)

    def _as_reached(self) -> ServeConfig:
        address = self._proxy_address("proxy-0")
        assert address is not None
        return replace(self._config, proxy=replace(self._config.proxy, host=address[0]))

    def _write_processes(self) -> None:
        states = sorted(self._actors.states.items())
        processes = {name: state["pid"] or None for name, state in states}
        if self._own_store is not None:
            processes["store"] = self._own_store.pid if self._own_store.running else None
        nodes = {name: state["node"] for name, state in states}
        write_state(self._run_dir, self._config.store, {"processes": processes, "nodes": nodes})


def serve_on_ray(config: ServeConfig) -> None:
    """Runs the cluster until Ctrl-C or SIGTERM and exits with its code."""
    setup_logging("serve", config.proxy.log_level, config.proxy.log_format)
    check_secrets(config)
    forget_variables()
    check_installed()
    check_cluster_name(config.ray.cluster_name)
    check_scaled(config)
    with run_folder(config.run_dir) as run_dir:
        code = _serve(config, run_dir)
    if code:
        sys.exit(code)


def _serve(config: ServeConfig, run_dir: Path) -> int:
    if config.ray.address:
        check_shared(config)
    else:
        config = with_own_files(config, run_dir)
    config, model = _with_model(with_files(config))
    with _own_store(config, run_dir) as own:
        store = own.url if own is not None else config.store
        with _ray(config, model, store):
            pools = plan_actors(config, model=model, store=store, home=node_ip())
            config = replace(config, store=store_url(store, config.proxy))
            actors = ActorSupervisor(RayActors(config.ray.cluster_name), pools)
            return asyncio.run(ServeLoop(config, actors, pools, run_dir, own).run())


def _with_model(config: ServeConfig) -> tuple[ServeConfig, str]:
    """(config with the model's folder and name here, MODEL as other nodes resolve it)."""
    given = resolve_demo(config.demo, config.model)
    path = resolve_model(given)
    check_encoder_model(path, config.encoder)
    check_pd_model(path, config.pd)
    name = config.pd.served_model_name or model_name(path)
    config = replace(
        config,
        model=str(path),
        encoder=replace(config.encoder, served_model_name=name),
        pd=replace(config.pd, served_model_name=name),
    )
    # A folder is the same everywhere; a hub id, and the demo model of the package, may lie elsewhere.
    if path == DEMO_MODEL:
        return config, ""
    return config, str(path) if Path(given).expanduser().is_dir() else given


@contextmanager
def _own_store(config: ServeConfig, run_dir: Path) -> Iterator[EmbeddedStore | None]:
    """A store of our own within the `with`; None where the config names one."""
    if config.store != "auto":
        yield None
        return
    # Refuses the files of a store of the user's.
    store_url(config.store, config.proxy)
    with EmbeddedStore(run_dir, config.store_memory) as server:
        yield server


@contextmanager
def _ray(config: ServeConfig, model: str, store: str) -> Iterator[None]:
    """The connection to Ray within the `with`."""
    # Before Ray starts: what cannot be planned ends here.
    pools = plan_actors(config, model=model, store=store, home="127.0.0.1")
    connect(config.ray.address, namespace_of(config.ray.cluster_name), max(usable_cpus(), _cpus(pools)))
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            disconnect()


def _cpus(pools: Mapping[str, ActorPool]) -> int:
    """The CPUs that all actors reserve together."""
    return math.ceil(sum(pool.size.maximum * pool.resources.num_cpus for pool in pools.values()))
