"""`triptych serve`: from options to a supervised cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from triptych.cli.commands.first_request import first_request
from triptych.cli.credentials import forget_variables, store_of
from triptych.cli.options import arguments, build, secrets_of
from triptych.config import (
    SHARING_FLAGS,
    ColocatedConfig,
    EncoderConfig,
    PDConfig,
    ProxyConfig,
    check_front_door,
    parse_size,
    read_internal_token,
)
from triptych.ec_connector.store.address import parse_store_url
from triptych.errors import ConfigError
from triptych.launch.embedded_store import EmbeddedStore
from triptych.launch.fork.client import ForkServer
from triptych.launch.model_path import (
    AUDIO_DEMO_MODEL,
    DEMO_MODEL,
    model_name,
    resolve_demo,
    resolve_model,
)
from triptych.launch.plan.cores import assign_cores, check_sharing, proxy_cores, share_cores
from triptych.launch.plan.placement import check_memory, place_on_gpus
from triptych.launch.plan.shape import ClusterShape, shape_of
from triptych.launch.supervisor import ClusterPlan, Supervisor, check_port
from triptych.log import setup_logging
from triptych.machine.resources import cpu_quota, may_claim_cores, numa_nodes, usable_cpus
from triptych.models.support import check_supported, wanted_by_flags

logger = logging.getLogger("launch")


def serve_cluster(values: dict[str, Any]) -> None:
    """Runs the cluster until Ctrl-C or SIGTERM and exits with its code."""
    setup_logging("serve", values["log_level"])
    forget_variables()
    _check_store_flag(values["store"])
    values = values | {"store": store_of(values), "store_password_file": ""}
    values |= {"internal_token": internal_token(values), "internal_token_file": ""}
    check_front_door(
        values["host"], api_key=values["api_key"], api_key_file=values["api_key_file"], auth=values["auth"]
    )
    path = resolve_model(resolve_demo(values["demo"], values["model"]))
    check_supported(path, wanted_by_flags(build(PDConfig, values)))
    name = values["served_model_name"] or model_name(path)
    check_port(values["host"], values["port"], "--port")
    check_port(values["host"], values["grpc_port"], "--grpc-port")
    store_memory = parse_size(str(values["store_memory"])) if values["store"] == "auto" else 0
    values, memory = _share_machine(path, values, store_memory)
    run_dir = Path(values["run_dir"] or tempfile.mkdtemp(prefix="triptych-")).absolute()
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        plan = plan_cluster(path, name, values, run_dir, store_memory, memory)
        code = asyncio.run(Supervisor(plan, lambda: _say_ready(path, name, values)).run())
    finally:
        if not values["run_dir"]:
            shutil.rmtree(run_dir, ignore_errors=True)
    if code:
        sys.exit(code)


def _share_machine(
    path: Path, values: dict[str, Any], store_memory: int
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The flags with a number of encoders that fits, and those that workers get by their memory, by name.

    ConfigError where not even one encoder fits.
    """
    cores = usable_cpus()
    chosen = share_cores(values, cores)
    try:
        memory = check_memory(path, chosen, store_memory)
    except ConfigError:
        if values["encoders"] or chosen["encoders"] == 1:
            raise
        chosen = share_cores(values | {"encoders": 1}, cores)
        memory = check_memory(path, chosen, store_memory)
    return chosen, memory | place_on_gpus(path, chosen)


def plan_cluster(
    path: Path,
    name: str,
    values: dict[str, Any],
    run_dir: Path,
    store_memory: int,
    memory: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> ClusterPlan:
    """The processes of the cluster; `memory` has flags of single workers, by name."""
    store = EmbeddedStore(run_dir, store_memory) if values["store"] == "auto" else None
    url = store.url if store is not None else values["store"]
    # Workers of one machine stay on loopback, on ports of their own choice.
    worker = values | {"store": url, "host": "127.0.0.1", "port": 0, "metrics_port": 0, "advertise": ""}
    worker["served_model_name"] = name
    # What the proxy's clients send is nothing that a worker needs to know.
    worker_secrets = dict.fromkeys(secrets_of(ProxyConfig, {}), "") | secrets_of(PDConfig, worker)
    shape = shape_of(values)
    # Alone, a replica keeps embeddings to itself; several share them through the store.
    alone = shape.replicas == 1 and store is not None
    worker |= {"connector": "memory" if alone else "redis", "store_memory": store_memory}
    paced = values["cpu_sharing"] == "pace"
    kept = paced and may_claim_cores()
    door = proxy_cores(os.sched_getaffinity(0), shape.pd_workers) if kept else ""
    proxy = (
        *_triptych("proxy"),
        *arguments(ProxyConfig, values | {"store_memory": store_memory, "cpus": door}),
    )
    return ClusterPlan(
        workers=_workers(shape, path, worker, run_dir, memory),
        worker_secrets=worker_secrets,
        proxy=proxy,
        proxy_secrets=secrets_of(ProxyConfig, values | {"store": url}),
        proxy_address=(values["host"] if values["host"] != "0.0.0.0" else "127.0.0.1", values["port"]),
        pools={"encoder": shape.encoding, "pd": shape.decoding},
        run_dir=run_dir,
        store_url=url,
        store=store,
        fork_server=_fork_server(path) if ForkServer.possible(values["device"]) else (),
    )


def _workers(
    shape: ClusterShape,
    path: Path,
    values: dict[str, Any],
    run_dir: Path,
    memory: Mapping[str, Mapping[str, Any]],
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Name and command of each worker, with the cores that it gets."""
    check_sharing(
        values["cpu_sharing"], cpus_per_worker=values["cpus_per_worker"], topology=values["topology"]
    )
    kinds: tuple[tuple[str, int, tuple[type[Any], ...], dict[str, Any]], ...] = (
        ("pd", shape.pd_workers, (PDConfig,), _pd_values(values)),
        ("encoder", shape.encoders, (EncoderConfig,), {"threads": values["encoder_threads"]}),
        ("colocated", shape.replicas, (EncoderConfig, PDConfig, ColocatedConfig), {}),
    )
    cpus = assign_cores(
        os.sched_getaffinity(0),
        shape.workers,
        values["cpus_per_worker"],
        quota=cpu_quota(),
        nodes=numa_nodes(),
    )
    page = str(run_dir / "cores") if values["cpu_sharing"] == "pace" else ""
    workers: list[tuple[str, tuple[str, ...]]] = []
    for kind, count, configs, own in kinds:
        for index in range(count):
            slot, name = len(workers), f"{kind}-{index}"
            given = values | own | {"cpus": cpus[slot], "core_page": page, "core_slot": slot}
            given |= memory.get(name, {})
            without = SHARING_FLAGS if kind == "colocated" else ()
            command = (*_triptych(kind), str(path), *arguments(configs, given, without))
            workers.append((name, command))
    return tuple(workers)


def _pd_values(values: dict[str, Any]) -> dict[str, Any]:
    """What PD workers get otherwise than encoders."""
    paced = values["cpu_sharing"] == "pace"
    return {"step_interval": values["step_interval"] if paced else 0.0, "keep_core": paced}


def internal_token(values: dict[str, Any]) -> str:
    """The cluster's token; without one, other users of this machine must not reach the workers either."""
    given = read_internal_token(values["internal_token"], values["internal_token_file"])
    return given or secrets.token_urlsafe(32)


def _triptych(command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "triptych.cli", command)


def _fork_server(path: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "triptych.launch.fork.server", str(path))


def _say_ready(path: Path, name: str, values: dict[str, Any]) -> None:
    url = f"http://{values['host']}:{values['port']}"
    lines = [f"Triptych answers for {name!r} at {url} (gRPC {values['host']}:{values['grpc_port']}).", ""]
    command = Path(sys.executable).with_name("triptych")
    if path == DEMO_MODEL:
        from triptych.demo import examples

        lines += [
            "Paste one of these, from any folder:",
            f"  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' "
            f"-d @{examples.EXAMPLE_REQUEST}",
            f'  {command} ask "{examples.EXAMPLE_QUESTION}" --image {examples.EXAMPLE_IMAGE} --url {url}',
            "",
            f"The picture: {examples.EXAMPLE_IMAGE}",
            f"The answer:  {examples.EXPECTED_ANSWER}",
        ]
    elif path == AUDIO_DEMO_MODEL:
        lines += [
            "Paste these, one after another, in a folder of your own:",
            f"  {command} tones 5551234 -o tones.wav",
            f"  {command} transcribe tones.wav --url {url}",
            f"  curl -s {url}/v1/audio/transcriptions -F file=@tones.wav -F response_format=verbose_json",
            "",
            "The answer: 5551234; that of curl has its times too.",
        ]
    else:
        lines += ["Paste this, from any folder:", f"  {first_request(path, str(command), url)}"]
    if values["api_key"] or values["api_key_file"]:
        lines += [
            "",
            "It asks for an API key: export TRIPTYCH_API_KEY=…, and give curl",
            '  -H "Authorization: Bearer $TRIPTYCH_API_KEY"',
        ]
    sys.stdout.write("\n" + "\n".join([*lines, "", "Ctrl-C ends it."]) + "\n\n")
    sys.stdout.flush()


def _check_store_flag(store: str) -> None:
    """ConfigError for a --store that names neither `auto` nor an address."""
    if store != "auto":
        parse_store_url(store)
