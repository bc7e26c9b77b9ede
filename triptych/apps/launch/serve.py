"""`triptych serve`: from a config to a supervised cluster."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Collection
from dataclasses import replace

from triptych.apps.launch.cluster_state import run_folder
from triptych.apps.launch.greeting import greeting
from triptych.apps.launch.model_path import model_name, resolve_demo, resolve_model
from triptych.apps.launch.plan.cluster import plan_cluster
from triptych.apps.launch.plan.cores import share_cores
from triptych.apps.launch.plan.devices import Share
from triptych.apps.launch.plan.memory import check_memory, place_on_gpus
from triptych.apps.launch.secrets import forget_variables, store_url, without_store_files
from triptych.apps.launch.supervisor import Supervisor
from triptych.base.config import (
    ProxyConfig,
    ServeConfig,
    WorkerRange,
    check_front_door,
    check_scaled,
    read_internal_token,
)
from triptych.base.errors import ConfigError
from triptych.base.log import setup_logging
from triptych.base.machine.resources import usable_cpus
from triptych.base.rpc.ports import check_port, port_error
from triptych.base.rpc.tls.certificates import proxy_certificates
from triptych.base.tracing.start import check_tracing
from triptych.models.checkpoint.first_checks import check_encoder_model, check_pd_model
from triptych.pd_worker.frontend.first_checks import check_pd_flags

logger = logging.getLogger("launch")

#: Pairs of ports that are tried where nobody has named one.
_PORT_TRIES = 16


def serve_cluster(config: ServeConfig, fixed: Collection[str]) -> None:
    """Runs the cluster until Ctrl-C or SIGTERM and exits with its code. `fixed` ports are not changed."""
    setup_logging("serve", config.proxy.log_level, config.proxy.log_format)
    forget_variables()
    config, shares = share_machine(_checked(config, fixed))
    with run_folder(config.run_dir) as run_dir:
        plan = plan_cluster(config, run_dir, shares)
        code = asyncio.run(Supervisor(plan, lambda: _say(greeting(config))).run())
    if code:
        sys.exit(code)


def _checked(config: ServeConfig, fixed: Collection[str]) -> ServeConfig:
    """The config with its secrets, its model's folder and name; ConfigError for what cannot be served."""
    check_scaled(config)
    store = store_url(config.store, config.proxy)
    proxy = with_token(config).proxy
    check_front_door(proxy.host, api_key=proxy.api_key, api_key_file=proxy.api_key_file, auth=proxy.auth)
    proxy_certificates(proxy)  # refuses what cannot be used
    check_tracing(proxy)
    path = resolve_model(resolve_demo(config.demo, config.model))
    check_encoder_model(path, config.encoder)
    check_pd_model(path, config.pd)
    check_pd_flags(config.pd)
    proxy = with_free_ports(proxy, fixed)
    name = config.pd.served_model_name or model_name(path)
    return replace(
        config,
        model=str(path),
        store=store,
        store_memory=config.store_memory if store == "auto" else 0,
        encoder=replace(config.encoder, served_model_name=name),
        pd=replace(config.pd, served_model_name=name),
        proxy=without_store_files(proxy),
    )


def with_free_ports(proxy: ProxyConfig, fixed: Collection[str]) -> ProxyConfig:
    """The config with the next free ports of its host, in steps of a pair; ConfigError for one in `fixed`.

    Another cluster of this machine may have the usual ones.
    """
    for step in range(0, _PORT_TRIES * 2, 2):
        port = proxy.port + step * ("port" not in fixed)
        grpc_port = proxy.grpc_port + step * ("grpc_port" not in fixed)
        if port == grpc_port != 0 or port_error(proxy.host, port) or port_error(proxy.host, grpc_port):
            continue
        if step:
            logger.warning(
                "port %d or %d is taken, perhaps by another cluster: this one takes %d, and %d for gRPC",
                *(proxy.port, proxy.grpc_port, port, grpc_port),
            )
        return replace(proxy, port=port, grpc_port=grpc_port)
    check_port(proxy.host, proxy.port, "--port")
    check_port(proxy.host, proxy.grpc_port, "--grpc-port")
    return proxy


def with_token(config: ServeConfig) -> ServeConfig:
    """The config with a token: without one, other users of this machine could reach the workers."""
    given = read_internal_token(config.proxy.internal_token, config.proxy.internal_token_file)
    token = given or secrets.token_urlsafe(32)
    return replace(config, proxy=replace(config.proxy, internal_token=token, internal_token_file=""))


def share_machine(config: ServeConfig) -> tuple[ServeConfig, dict[str, Share]]:
    """The config with a number of encoders that fits, and the shares of workers by name.

    ConfigError where not even one encoder fits.
    """
    cores = usable_cpus()
    chosen = share_cores(config, cores)
    try:
        shares = check_memory(chosen)
    except ConfigError:
        if config.encoders.maximum or chosen.encoders.maximum == 1:
            raise
        chosen = share_cores(replace(config, encoders=WorkerRange.fixed(1)), cores)
        shares = check_memory(chosen)
    return chosen, shares | place_on_gpus(chosen)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
