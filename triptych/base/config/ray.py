"""The flags of a cluster on Ray."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.config.flags import Config, flag, flags_of
from triptych.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RayConfig(Config):
    """The flags that only `--launcher ray` has."""

    address: str = flag(
        "",
        "Ray cluster to use: GCS host:port, or auto for the one on this machine; default: start a new Ray"
        " on this machine and stop it at the end",
    )
    cluster_name: str = flag(
        "triptych", "name that distinguishes the actors of this cluster from those of others in the same Ray"
    )
    proxies: int = flag(
        1, "number of proxies; each further one uses --port and --grpc-port plus 10", least=1, most=16
    )
    ray_resources: str = flag(
        "",
        "TOML file with the resources that Ray reserves per worker of each pool; default: one CPU, or one"
        " GPU on CUDA",
    )
    start_timeout: float = flag(
        600.0, "seconds until all workers that always run must be placed and registered", least=1
    )


def check_no_ray(config: RayConfig) -> None:
    """ConfigError for a flag of Ray's where another launcher is chosen."""
    for one in flags_of(RayConfig):
        if getattr(config, one.name) != one.default:
            raise ConfigError(f"{one.option} is for --launcher ray: say that too, or leave it out")
