"""The connection to Ray, joined or started, and the actors and placement groups of one cluster there.

Calls block: use a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from triptych.apps.launch.ray.actor import ActorState, ServiceActor
from triptych.apps.launch.ray.pools import ActorPool
from triptych.base.errors import ConfigError

#: Seconds that a GCS gets to answer.
_PROBE_SECONDS = 5.0
_HEALTH = "/grpc.health.v1.Health/Check"


def check_installed() -> None:
    """ConfigError where Ray is missing."""
    if find_spec("ray") is None:
        raise ConfigError("--launcher ray needs Ray: pip install 'triptych[ray]'")


def connect(address: str, namespace: str, cpus: int) -> None:
    """Makes this process a driver in Ray; ConfigError within seconds where there is none at `address`.

    Without an address a Ray of at least `cpus` CPUs starts on this machine, which ends with `disconnect`.
    """
    if not address:
        # Read when Ray is imported: a Ray of ours reports to nobody, and its actors are no batch jobs.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")
        if "RAY_AUTH_MODE" not in os.environ:
            # Who can connect to a GCS without it runs code here; before Ray 2.59 it is off unless asked for.
            os.environ["RAY_AUTH_MODE"] = "token"
            if "RAY_AUTH_TOKEN_PATH" not in os.environ:
                os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    elif "://" in address:
        raise ConfigError(
            f"--address {address}: Ray Client is not supported; run this command on a node of that Ray and "
            "give the GCS, like 10.0.0.1:6379, or auto"
        )
    else:
        address = _found() if address == "auto" else address
        _check_gcs(address)
    import ray

    try:
        if address:
            ray.init(address, namespace=namespace, logging_level=logging.ERROR)
        else:
            ray.init("local", namespace=namespace, num_cpus=cpus, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if not address:
            raise ConfigError(f"--launcher ray: Ray does not start: {lines[0]}") from error
        raise ConfigError(
            f"--address {address}: Ray cannot be used ({lines[0]}): this machine must be a node of it, with "
            "the same versions of Ray and Python; `ray start --address=…` makes it one"
        ) from error


def disconnect() -> None:
    """Leaves Ray; one that `connect` has started ends."""
    import ray

    ray.shutdown()


def _found() -> str:
    """The GCS of the Ray on this machine that `ray start` has written down."""
    given = os.environ.get("RAY_ADDRESS", "")
    if given:
        return given
    folder = os.environ.get("RAY_TMPDIR") or "/tmp"
    try:
        return Path(folder, "ray", "ray_current_cluster").read_text(encoding="utf-8").strip()
    except OSError:
        raise ConfigError(
            "--address auto: no Ray runs on this machine; `ray start --head` starts one, or leave --address "
            "out"
        ) from None


def _check_gcs(address: str) -> None:
    """ConfigError unless a gRPC server answers at host:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--address {address}: write host:port of Ray's GCS, like 10.0.0.1:6379, or auto")
    remedy = "`ray start --head` starts Ray there, and without --address one is started here"
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"--address {address}: no Ray answers there ({reason}); {remedy}") from None
    if os.environ.get("RAY_USE_TLS", "0") != "1" and not _speaks_grpc(address):
        raise ConfigError(f"--address {address}: the server there is not Ray; {remedy}")


def _speaks_grpc(address: str) -> bool:
    """Whether a gRPC server is there: any status is an answer but those that gRPC makes up itself."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(_HEALTH, lambda message: message, lambda message: message)
        try:
            call(b"", timeout=_PROBE_SECONDS)
        except grpc.RpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True


#: The actor that ends with the `triptych serve` that created it.
SERVE = "serve"
#: Seconds that a call to an actor waits for its answer.
_CALL_SECONDS = 5.0
_GONE = ("REMOVED",)


@dataclass(frozen=True, slots=True)
class ActorGroup:
    """A placement group: the bundles and the strategy that it was made with, and whether it is placed."""

    bundles: tuple[tuple[tuple[str, float], ...], ...]
    strategy: str
    placed: bool


class ServeActor:
    """A Ray actor that says which `triptych serve` watches over the cluster; it ends with it."""

    def __init__(self, who: str) -> None:
        self._who = who

    def who(self) -> str:
        """The process, for people."""
        return self._who


def namespace_of(cluster: str) -> str:
    """The namespace of a cluster's actors."""
    return f"triptych-{cluster}"


class RayActors:
    """The actors of the cluster `cluster`. Only one process at a time has them."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._namespace = namespace_of(cluster)
        self._serve: Any = None

    def claim(self) -> bool:
        """Makes this process the cluster's `triptych serve`; False while there is another one."""
        import ray

        who = f"process {os.getpid()} on {socket.gethostname()}"
        make = ray.remote(ServeActor)
        try:
            self._serve = make.options(name=SERVE, namespace=self._namespace, num_cpus=0).remote(who)
        except ValueError:
            return False
        return True

    def claimed_by(self) -> str:
        """The process that has the cluster; "" when none does any more."""
        try:
            return str(self._ask(SERVE, "who", _CALL_SECONDS))
        except ActorGone:
            return ""

    def names(self) -> set[str]:
        """The actors that live, wait for their place or are being restarted."""
        import ray

        actors = ray.util.list_named_actors(all_namespaces=True)
        return {one["name"] for one in actors if one["namespace"] == self._namespace} - {SERVE}

    def start(self, pool: ActorPool, name: str) -> None:
        """Creates an actor in its placement group; Ray starts it when the group has its place."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = ray.util.get_placement_group(self._group_name(pool.group(name)))
        wants = pool.resources
        ports = "{}-{}".format(*wants.ports)
        make = ray.remote(ServiceActor)
        make.options(
            name=name,
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=wants.num_cpus,
            num_gpus=wants.num_gpus,
            memory=wants.memory or None,
            resources=dict(wants.resources),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=pool.bundle_index(name)
            ),
        ).remote(name, pool.command_of(name), ports, pool.port_of(name))

    def states(self, names: Collection[str]) -> dict[str, ActorState]:
        """How the actors' services are; an actor that has no place yet, or does not answer, is missing."""
        import ray

        pending = {}
        for name in names:
            with contextlib.suppress(ValueError):
                actor = ray.get_actor(name, namespace=self._namespace)
                pending[actor.health.remote()] = name
        if not pending:
            return {}
        answered, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_CALL_SECONDS)
        states: dict[str, ActorState] = {}
        for ref in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                states[pending[ref]] = ray.get(ref)
        return states

    def command(self, name: str) -> list[str]:
        """The command line that the actor was made with; ActorGone when it does not answer."""
        return list(self._ask(name, "command", _CALL_SECONDS))

    def drain(self, name: str, seconds: float) -> None:
        """Returns when the actor's service has ended; ActorGone when it does not answer."""
        self._ask(name, "health", _CALL_SECONDS)
        self._ask(name, "drain", seconds)

    def kill(self, name: str) -> None:
        """Ends the actor for good. No effect when it is gone."""
        import ray

        try:
            ray.kill(ray.get_actor(name, namespace=self._namespace), no_restart=True)
        except ValueError:
            return

    def groups(self) -> dict[str, ActorGroup]:
        """The cluster's placement groups by name."""
        import ray

        prefix, groups = self._group_name(""), {}
        for row in ray.util.placement_group_table().values():
            if row["name"].startswith(prefix) and row["state"] not in _GONE:
                groups[row["name"].removeprefix(prefix)] = ActorGroup(
                    frozen(row["bundles"].values()), row["strategy"], row["state"] == "CREATED"
                )
        return groups

    def create_group(self, pool: ActorPool, group: str) -> None:
        """Asks Ray for the resources; a pending group is what Ray's autoscaler adds nodes for."""
        import ray

        ray.util.placement_group(
            pool.bundles(group),
            strategy=pool.resources.strategy,
            name=self._group_name(group),
            lifetime="detached",
        )

    def remove_group(self, group: str) -> None:
        """Gives the resources back; actors in it end. No effect when it is gone."""
        import ray

        try:
            ray.util.remove_placement_group(ray.util.get_placement_group(self._group_name(group)))
        except ValueError:
            return

    def _group_name(self, group: str) -> str:
        return f"triptych/{self._cluster}/{group}"

    def _ask(self, name: str, method: str, seconds: float) -> Any:
        import ray

        try:
            actor = ray.get_actor(name, namespace=self._namespace)
            return ray.get(getattr(actor, method).remote(), timeout=seconds)
        except (ValueError, ray.exceptions.RayError, TimeoutError) as error:
            raise ActorGone(f"{name} does not answer ({type(error).__name__})") from error


class ActorGone(Exception):
    """An actor that is not there, or does not answer."""


def frozen(bundles: Any) -> tuple[tuple[tuple[str, float], ...], ...]:
    """Bundles as they can be compared."""
    return tuple(tuple(sorted((name, float(n)) for name, n in one.items())) for one in bundles)


def node_ip() -> str:
    """The IP address of this machine's node."""
    import ray

    return str(ray.util.get_node_ip_address())


def free_resources() -> str:
    """What all nodes of Ray have together, and what of it is free, for people."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    names = [name for name in sorted(total) if not name.startswith(("node:", "object_store"))]
    return ", ".join(f"{name} {free.get(name, 0):g} of {total[name]:g}" for name in names)
