"""The flags of the proxy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.base.config.flags import DAY, GIB, KIB, MAX_PORT, MIB, MOMENT, Config, flag, part
from triptych.base.config.service import ServiceConfig
from triptych.base.errors import ConfigError
from triptych.base.scaling import (
    ITEM_SLO,
    ScaledTarget,
    ScalingRules,
    ScalingTarget,
    check_targets,
    parse_scaled,
)


@dataclass(frozen=True, slots=True)
class ScalingConfig(Config):
    """The flags of autoscaling. All proxies decide by those of the proxy that was started last."""

    min_encoders: int = flag(0, "fewest encoder workers, with --max-encoders", minimum=0)
    max_encoders: int = flag(0, "most encoder workers; 0: encoders are not scaled", minimum=0)
    min_pd_workers: int = flag(1, "fewest PD workers, with --max-pd-workers", minimum=1)
    max_pd_workers: int = flag(0, "most PD workers; 0: PD workers are not scaled", minimum=0)
    encoder_slo: float = flag(
        2.0,
        "target seconds for an item at the encoders, queueing included: their share of the TTFT",
        minimum=MOMENT,
        maximum=DAY,
    )
    scale_window: float = flag(
        60.0,
        "seconds for which fewer workers must have sufficed before one is drained",
        minimum=MOMENT,
        maximum=DAY,
    )
    scale: str = flag(
        "",
        "workers to scale apart: encoder or pd, what they are (;model= ;kind= ;role=), then ;min= ;max= "
        ";slo= and the ;price= of one; several separated by commas, in place of --max-encoders",
        joined=True,
    )
    scaler_port: int = flag(
        0, "port of KEDA's external scaler, without API keys and TLS; 0: none", minimum=0, maximum=MAX_PORT
    )
    scaler_host: str = flag("127.0.0.1", "address to bind --scaler-port to")

    def targets(self) -> list[ScaledTarget]:
        """What is scaled, and by which rules; ConfigError where a --scale cannot be read or two overlap."""
        found = []
        window = self.scale_window
        if self.max_encoders:
            rules = ScalingRules(self.min_encoders, self.max_encoders, self.encoder_slo, window=window)
            found.append(ScaledTarget(ScalingTarget("encoder"), rules))
        if self.max_pd_workers:
            rules = ScalingRules(self.min_pd_workers, self.max_pd_workers, ITEM_SLO, window=window)
            found.append(ScaledTarget(ScalingTarget("pd"), rules))
        for text in filter(None, map(str.strip, self.scale.split(","))):
            try:
                found.append(parse_scaled(text, window, self.encoder_slo))
            except ValueError as error:
                raise ConfigError(f"--scale {text[:200]}: {error}") from None
        try:
            check_targets(found)
        except ValueError as error:
            raise ConfigError(f"--scale: {error}") from None
        return found


def check_scaling(config: ScalingConfig) -> None:
    """ConfigError for sizes and times by which no pool can be scaled."""
    for pool, minimum, maximum, begin in (
        ("encoders", config.min_encoders, config.max_encoders, 0),
        ("pd-workers", config.min_pd_workers, config.max_pd_workers, 1),
    ):
        if minimum < begin:
            raise ConfigError(f"--min-{pool} {minimum}: at least {begin}")
        if maximum < 0:
            raise ConfigError(f"--max-{pool} {maximum}: 0 for no decisions, or the most workers of the pool")
        if maximum and minimum > maximum:
            raise ConfigError(
                f"--min-{pool} {minimum} is above --max-{pool} {maximum}: lower it, or raise the most"
            )
    for name, seconds in (("--encoder-slo", config.encoder_slo), ("--scale-window", config.scale_window)):
        if not (math.isfinite(seconds) and 0.0 < seconds <= 86400.0):
            raise ConfigError(f"{name} {seconds:g}: give seconds, more than 0 and at most 86400")
    if not config.targets() and config.scaler_port:
        raise ConfigError(
            "--scaler-port answers with decisions, and none is made: give --max-encoders, --max-pd-workers "
            "or --scale"
        )


@dataclass(frozen=True, slots=True)
class ProxyConfig(ServiceConfig):
    """The flags of the proxy."""

    host: str = flag("127.0.0.1", "address to bind HTTP and gRPC to")
    port: int = flag(8000, "HTTP port", minimum=0, maximum=MAX_PORT)
    grpc_port: int = flag(8001, "gRPC port", minimum=0, maximum=MAX_PORT)
    http_cert_file: str = flag("", "certificate chain (PEM) of the HTTP and gRPC ports")
    http_key_file: str = flag("", "private key of --http-cert-file (PEM, unencrypted)")
    max_images: int = flag(16, "most images in one request", minimum=0)
    max_choices: int = flag(16, "most answers (n) to one request", minimum=1)
    max_body: int = flag(64 * MIB, "largest request body", size=True, minimum=KIB)
    unknown_fields: str = flag(
        "ignore",
        "fields of a request that the server does not know (misspelt ones are refused): ignore, and name "
        "them in the header X-Triptych-Ignored-Fields of the reply, or reject",
        choices=("ignore", "reject"),
    )
    body_memory: int = flag(GIB, "memory for the bodies of requests in flight", size=True, minimum=KIB)
    reply_memory: int = flag(
        512 * MIB,
        "memory for output that waits for its client; at most half of it for one key",
        size=True,
        minimum=KIB,
    )
    media_urls: bool = flag(True, "fetch images from http(s) URLs")
    media_timeout: float = flag(
        30.0, "seconds to fetch one image, including redirects and retries", minimum=MOMENT, maximum=DAY
    )
    media_fetches: int = flag(64, "most images fetched at once", minimum=1)
    max_media_bytes: int = flag(
        64 * MIB, "largest image or audio file, at most 64MiB", size=True, minimum=1, maximum=64 * MIB
    )
    media_memory: int = flag(GIB, "memory for the media of requests in flight", size=True, minimum=KIB)
    media_disk: int = flag(
        4 * GIB, "disk space for media above 1MiB of requests in flight", size=True, minimum=0
    )
    spool_folder: str = flag("", "folder for media kept on disk; default: the system's temporary folder")
    allow_media_hosts: str = flag(
        "", "comma-separated hosts from which images may be fetched at any address and port"
    )
    allow_media_networks: str = flag(
        "", "comma-separated networks from which images may be fetched although they are not public"
    )
    allowed_media_folder: str = flag("", "folder below which file: URLs are allowed; default: none")
    max_queue: int = flag(256, "requests in flight before new ones get 429", minimum=1)
    flow_control: bool = flag(
        True,
        "encode an item only when a PD worker has room for it; --no-flow-control exists only to measure "
        "its effect",
    )
    skip_held_items: bool = flag(
        True,
        "create no encoder job for an item that a PD worker's KV cache still covers; --no-skip-held-items"
        " always encodes items that the store has lost",
    )
    prefill_threshold: int = flag(
        256,
        "estimated prompt tokens from which a request goes to a prefill worker first, where PD workers have "
        "roles; decode workers compute shorter ones whole",
        minimum=0,
    )
    request_timeout: float = flag(300.0, "deadline of a request in seconds", minimum=MOMENT, maximum=DAY)
    store_wait: float = flag(
        2.0,
        "seconds that a request waits for an embedding store that no worker reaches before it gets 503",
        minimum=MOMENT,
        maximum=DAY,
    )
    store_memory: int = flag(0, "byte budget of the store; 0: its maxmemory", size=True, minimum=0)
    allowed_origins: str = flag(
        "", "comma-separated origins whose pages browsers let call this server (CORS); * for any"
    )
    allowed_hosts: str = flag(
        "",
        "comma-separated host names to which a proxy without API keys on loopback answers, beside this "
        "machine's own; * for any",
    )
    api_key: str = flag(
        "", "API key that clients must send; several separated by commas", secret=True, joined=True
    )
    api_key_file: str = flag("", "file with hashed API keys, names and limits; read again when it changes")
    auth: bool = flag(True, "require API keys on a non-loopback --host; --no-auth if a gateway checks keys")
    key_requests_per_minute: int = flag(0, "most requests per minute of one key; 0: no limit", minimum=0)
    key_tokens_per_minute: int = flag(
        0, "most prompt and output tokens per minute of one key; 0: no limit", minimum=0
    )
    key_concurrent_requests: int = flag(0, "most concurrent requests of one key; 0: no limit", minimum=0)
    trusted_proxies: str = flag(
        "", "comma-separated networks of gateways that tell a client's address, by X-Forwarded-For"
    )
    proxy_protocol: bool = flag(
        False, "HTTP connections of --trusted-proxies begin with a header of the PROXY protocol, v1 or v2"
    )
    page: bool = flag(True, "serve the web page at / and live data of the cluster")
    page_ttft_slo: float = flag(
        4.0, "TTFT limit in seconds that the web page counts as good", minimum=MOMENT, maximum=DAY
    )
    page_tpot_slo: float = flag(
        0.2, "TPOT limit in seconds that the web page counts as good", minimum=MOMENT, maximum=DAY
    )
    metrics_port: int = flag(
        0,
        "separate port for /metrics and a kubelet's /health and /ready; 0: none, /metrics is then on the "
        "HTTP port and needs an API key if keys are used",
        minimum=0,
        maximum=MAX_PORT,
    )
    metrics_host: str = flag("", "address to bind --metrics-port to; default: --host")
    scaling: ScalingConfig = part(ScalingConfig)


def check_ports_differ(config: ProxyConfig) -> None:
    """ConfigError for a port that two servers of the proxy would listen at: one would hear nothing."""
    taken: dict[tuple[str, int], str] = {}
    for flag_name, host, port in (
        ("--port", config.host, config.port),
        ("--grpc-port", config.host, config.grpc_port),
        ("--metrics-port", config.metrics_host or config.host, config.metrics_port),
        ("--scaler-port", config.scaling.scaler_host, config.scaling.scaler_port),
    ):
        if port and (other := taken.get((host, port))):
            raise ConfigError(f"{flag_name} {port} is {other}'s too: give each a port of its own")
        taken[host, port] = flag_name
