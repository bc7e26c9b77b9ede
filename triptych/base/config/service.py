"""The flags of every service."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.config.flags import DAY, MAX_PORT, Config, flag
from triptych.base.errors import ConfigError

#: Longer than any request may take: a day.
MAX_DRAIN_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class ServiceConfig(Config):
    """The flags that every service has."""

    store: str = flag(
        "",
        "store address: unix:///path/to/socket, redis://host:port/0, rediss:// for TLS; if it contains a "
        "password, use the environment variable instead of the flag",
        secret=True,
    )
    store_password_file: str = flag("", "file with the store's password, instead of a password in --store")
    store_ca_file: str = flag("", "CA certificates (PEM) to verify a rediss:// store; default: the system's")
    store_cert_file: str = flag("", "client certificate (PEM) for the store; read again when it is renewed")
    store_key_file: str = flag("", "private key of --store-cert-file (PEM, unencrypted)")
    internal_token: str = flag(
        "",
        "secret that calls between the services carry; required when binding to a non-loopback address",
        secret=True,
    )
    internal_token_file: str = flag("", "file with the internal token, instead of the flag")
    tls_cert_file: str = flag("", "certificate (PEM) of this service for mutual TLS between the services")
    tls_key_file: str = flag("", "private key of --tls-cert-file (PEM, unencrypted)")
    tls_ca_file: str = flag("", "CA certificates (PEM) that issued the certificates of the other services")
    tls_name: str = flag("triptych.internal", "DNS name in the certificates of all services")
    insecure: bool = flag(
        False, "talk to other machines without TLS, where a mesh, a gateway or the network itself encrypts"
    )
    stall_timeout: float = flag(
        60.0,
        "seconds without progress in one layer of a step after which a worker's process exits and proxies"
        " move its requests; 0: never",
        minimum=0,
        maximum=DAY,
    )
    drain_timeout: float = flag(
        30.0,
        "seconds after SIGTERM to finish the work in progress; the supervisor's or kubelet's grace period"
        " should be at least 15 s longer",
        minimum=0,
        maximum=DAY,
    )
    log_level: str = flag("info", "lowest level to log", choices=("debug", "info", "warning", "error"))
    log_format: str = flag(
        "text", "format of the log: lines of text, or one JSON object per line", choices=("text", "json")
    )
    otlp_endpoint: str = flag(
        "", "OTLP/HTTP collector for the spans of requests, like http://127.0.0.1:4318; default: no tracing"
    )
    trace_sample: float = flag(
        1.0,
        "fraction of requests to trace, 0 to 1, if the caller has not decided; 0: none",
        minimum=0,
        maximum=1,
    )
    metrics_port: int = flag(
        0,
        "port of this process for /metrics, /health and /ready; 0 picks a free one",
        minimum=0,
        maximum=MAX_PORT,
    )
    cpus: str = flag("", "cores to run on, like 0,1 or 2-3; all by default")


def check_drain_timeout(seconds: float) -> None:
    """ConfigError for a time that is none."""
    if not 0.0 <= seconds <= MAX_DRAIN_SECONDS:
        raise ConfigError(
            f"--drain-timeout {seconds:g}: give seconds, 0 or more and at most {MAX_DRAIN_SECONDS:g}"
        )
