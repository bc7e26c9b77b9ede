"""The flags of a cluster on Ray."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.config.flags import Config, flag, flags_of
from triptych.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RayConfig(Config):
    """The flags that only `--launcher ray` has."""

    address: str = flag(
        "",
        "GCS of the Ray to run in, host:port, or auto for this machine's; without it a Ray of its own is "
        "started on this machine, and ended",
    )
    cluster_name: str = flag("triptych", "tells this cluster's actors from those of others in the same Ray")
    proxies: int = flag(
        1, "proxies; proxy-1 listens at --port and --grpc-port plus 10, and so on", least=1, most=16
    )
    ray_resources: str = flag(
        "",
        "TOML file of what Ray reserves for a worker of each pool; by default one CPU, on CUDA one GPU",
    )
    start_timeout: float = flag(
        600.0, "seconds until all workers that the cluster always has are placed and registered", least=1
    )


def check_no_ray(config: RayConfig) -> None:
    """ConfigError for a flag of Ray's where another launcher is chosen."""
    for one in flags_of(RayConfig):
        if getattr(config, one.name) != one.default:
            raise ConfigError(f"{one.option} is for --launcher ray: say that too, or leave it out")
