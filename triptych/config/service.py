"""The flags of every service."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.config.flags import Config, flag
from triptych.errors import ConfigError

#: Longer than any request may take: a day.
MOST_DRAIN_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class ServiceConfig(Config):
    """The flags that every service has."""

    store: str = flag(
        "",
        "store address: unix:///path/to/socket, redis://host:port/0, rediss:// for TLS; one with a password "
        "rather by the variable than by the flag",
        secret=True,
    )
    store_password_file: str = flag("", "file that holds the store's password, in place of one in --store")
    store_ca_file: str = flag(
        "", "CA certificates that verify a rediss:// store, as PEM; the system's by default"
    )
    store_cert_file: str = flag("", "client certificate for the store, as PEM; read again when it is renewed")
    store_key_file: str = flag("", "key of --store-cert-file, as PEM, unencrypted")
    internal_token: str = flag(
        "", "shared secret of the cluster's gRPC; needed for non-loopback binds", secret=True
    )
    internal_token_file: str = flag("", "file that holds the internal token, in place of the flag")
    tls_cert_file: str = flag("", "this service's certificate (PEM) for gRPC between services; mutual TLS")
    tls_key_file: str = flag("", "the private key of --tls-cert-file (PEM, without a password)")
    tls_ca_file: str = flag("", "CA certificates (PEM) that those of the other services come from")
    tls_name: str = flag("triptych.internal", "DNS name in the certificates of all services")
    insecure: bool = flag(False, "serve other machines without TLS, where a mesh or gateway encrypts")
    stall_timeout: float = flag(
        60.0,
        "seconds that an engine may stand still in one layer of a step; then its worker's process ends, and "
        "proxies send its requests elsewhere; 0: for ever",
    )
    drain_timeout: float = flag(
        30.0,
        "seconds that the work in hand gets after SIGTERM; a supervisor's or kubelet's grace period is at "
        "least 15 longer",
    )
    log_level: str = flag("info", "least level to log", choices=("debug", "info", "warning", "error"))
    log_format: str = flag(
        "text", "form of the log: lines of text, or one JSON object in each line", choices=("text", "json")
    )
    otlp_endpoint: str = flag(
        "", "OTLP/HTTP collector that spans of requests go to, like http://127.0.0.1:4318; none by default"
    )
    trace_sample: float = flag(
        1.0,
        "part of the requests that are traced, 0 to 1, where their caller has not decided; 0 traces none",
    )
    metrics_port: int = flag(0, "port of /metrics, /health and /ready of this process; 0 picks a free one")
    cpus: str = flag("", "cores to run on, like 0,1 or 2-3; all by default")


def check_drain_timeout(seconds: float) -> None:
    """ConfigError for a time that is none."""
    if not 0.0 <= seconds <= MOST_DRAIN_SECONDS:
        raise ConfigError(
            f"--drain-timeout {seconds:g}: give seconds, 0 or more and at most {MOST_DRAIN_SECONDS:g}"
        )
