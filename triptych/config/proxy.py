"""The flags of the proxy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.config.flags import flag, part
from triptych.config.memory import GIB, MIB
from triptych.config.scaling import ScalingConfig
from triptych.config.service import ServiceConfig
from triptych.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ProxyConfig(ServiceConfig):
    """The flags of the proxy."""

    host: str = flag("127.0.0.1", "address to bind HTTP and gRPC to")
    port: int = flag(8000, "HTTP port")
    grpc_port: int = flag(8001, "gRPC port")
    http_cert_file: str = flag("", "certificate (PEM, with its intermediates) of the HTTP and gRPC ports")
    http_key_file: str = flag("", "the private key of --http-cert-file (PEM, without a password)")
    max_images: int = flag(16, "images in one request")
    max_choices: int = flag(16, "answers (n) to one request")
    max_body: int = flag(64 * MIB, "largest request body", size=True)
    body_memory: int = flag(GIB, "memory for the bodies of requests in flight", size=True)
    media_urls: bool = flag(True, "fetch pictures from http(s) URLs")
    media_timeout: float = flag(30.0, "seconds to fetch one picture, with redirects and retries")
    media_fetches: int = flag(64, "pictures fetched at once")
    max_media_bytes: int = flag(64 * MIB, "largest picture or audio file, at most 64MiB", size=True)
    media_memory: int = flag(GIB, "memory for the media of requests in flight", size=True)
    media_disk: int = flag(4 * GIB, "disk for those above 1MiB", size=True)
    spool_folder: str = flag("", "where those go; the system's temporary folder by default")
    allow_media_hosts: str = flag("", "hosts, by comma, that pictures may come from at any address and port")
    allow_media_networks: str = flag(
        "", "networks, by comma, that pictures may come from though they are not public"
    )
    allowed_media_folder: str = flag("", "folder that file: URLs may name; none by default")
    max_queue: int = flag(256, "requests in flight before new ones get 429")
    flow_control: bool = flag(
        True, "encode only what a PD worker has room for; --no-flow-control is for measurements of just that"
    )
    skip_held_items: bool = flag(
        True,
        "make no encoder job for what a PD worker's KV cache holds; --no-skip-held-items encodes what the "
        "store has lost in any case",
    )
    request_timeout: float = flag(300.0, "seconds that a request may take")
    store_memory: int = flag(0, "the store's byte budget; 0: as the store says", size=True)
    api_key: str = flag("", "key that clients must send; several with commas", secret=True, joined=True)
    api_key_file: str = flag("", "file of hashed keys with names and limits; re-read when it changes")
    auth: bool = flag(True, "a non-loopback --host needs API keys; --no-auth where a gateway asks for them")
    key_requests_per_minute: int = flag(0, "requests of one key in a minute; 0: no limit")
    key_tokens_per_minute: int = flag(0, "prompt and output tokens of one key in a minute; 0: no limit")
    key_concurrent_requests: int = flag(0, "requests of one key at once; 0: no limit")
    page: bool = flag(True, "serve the page at / with live data of the cluster; --no-page leaves both out")
    page_ttft_slo: float = flag(4.0, "seconds to the first token that the page counts as good")
    page_tpot_slo: float = flag(0.2, "seconds for each further token that the page counts as good")
    metrics_port: int = flag(
        0,
        "port of its own for /metrics, and for /health and /ready as a kubelet asks them; 0: none, and "
        "/metrics is on the HTTP port, by key where keys are in use",
    )
    metrics_host: str = flag("", "address to bind --metrics-port to; --host's by default")
    scaling: ScalingConfig = part(ScalingConfig)


def check_page(config: ProxyConfig) -> None:
    """ConfigError for an SLO that is no time."""
    for name, seconds in (
        ("--page-ttft-slo", config.page_ttft_slo),
        ("--page-tpot-slo", config.page_tpot_slo),
    ):
        if not (math.isfinite(seconds) and 0.0 < seconds <= 86400.0):
            raise ConfigError(f"{name} {seconds:g}: give seconds, more than 0 and at most 86400")
