"""What of a proxy's flags is refused before it waits for the store; `triptych doctor` asks for the same."""

from __future__ import annotations

from triptych.base.config import ProxyConfig
from triptych.proxy.http.hosts import own_names
from triptych.proxy.http.peers import TrustedProxies
from triptych.proxy.media.connection import parse_rules
from triptych.proxy.media.loader import checked_folder


def check_proxy_flags(config: ProxyConfig) -> None:
    """ConfigError for host names, origins, networks and a folder of media that cannot be used."""
    own_names(config, keys=False)
    TrustedProxies(config.trusted_proxies, proxy_protocol=config.proxy_protocol)
    parse_rules(config.allow_media_hosts, config.allow_media_networks)
    checked_folder(config.allowed_media_folder)
