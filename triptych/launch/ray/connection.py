"""The connection to Ray: the one at --address, checked before Ray's own minute of retries, or a new one."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from importlib.util import find_spec
from pathlib import Path

from triptych.errors import ConfigError

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
