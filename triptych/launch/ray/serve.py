"""`triptych serve --launcher ray`: from a config to actors that are watched over until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from triptych.config import ServeConfig, check_scaled
from triptych.launch.embedded_store import EmbeddedStore
from triptych.launch.model_path import DEMO_MODEL, model_name, resolve_demo, resolve_model
from triptych.launch.ray.access import check_secrets, check_shared, with_files, with_own_token
from triptych.launch.ray.actors import RayActors, namespace_of, node_ip
from triptych.launch.ray.connection import check_installed, connect, disconnect
from triptych.launch.ray.loop import ServeLoop
from triptych.launch.ray.plan import ActorPool, check_cluster_name, plan_actors
from triptych.launch.ray.supervisor import ActorSupervisor
from triptych.launch.run_folder import run_folder
from triptych.launch.secrets.credentials import forget_variables, store_url
from triptych.log import setup_logging
from triptych.machine.resources import usable_cpus
from triptych.models.checkpoint.support import check_supported, wanted_by_flags


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
        config = with_own_token(config, run_dir)
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
    check_supported(path, wanted_by_flags(config.pd))
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
    server = EmbeddedStore(run_dir, config.store_memory)
    server.start()
    try:
        yield server
    finally:
        server.stop()


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
    return math.ceil(sum(pool.size.most * pool.resources.num_cpus for pool in pools.values()))
