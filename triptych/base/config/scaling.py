"""The flags of autoscaling: the sizes that pools may have, and what they are scaled by."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.base.config.flags import Config, flag
from triptych.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ScalingConfig(Config):
    """The flags of autoscaling. All proxies decide by those of the proxy that was started last."""

    min_encoders: int = flag(0, "fewest encoder workers, with --max-encoders", least=0)
    max_encoders: int = flag(0, "most encoder workers; 0: encoders are not scaled", least=0)
    min_pd_workers: int = flag(1, "fewest PD workers, with --max-pd-workers", least=1)
    max_pd_workers: int = flag(0, "most PD workers; 0: PD workers are not scaled", least=0)
    encoder_slo: float = flag(
        2.0, "target seconds for an item at the encoders, queueing included: their share of the TTFT"
    )
    scale_window: float = flag(
        60.0, "seconds for which fewer workers must have sufficed before one is drained"
    )
    scaler_port: int = flag(0, "port of KEDA's external scaler, without API keys and TLS; 0: none", least=0)
    scaler_host: str = flag("127.0.0.1", "address to bind --scaler-port to")


def check_scaling(config: ScalingConfig) -> None:
    """ConfigError for sizes and times by which no pool can be scaled."""
    for pool, least, most, begin in (
        ("encoders", config.min_encoders, config.max_encoders, 0),
        ("pd-workers", config.min_pd_workers, config.max_pd_workers, 1),
    ):
        if least < begin:
            raise ConfigError(f"--min-{pool} {least}: at least {begin}")
        if most < 0:
            raise ConfigError(f"--max-{pool} {most}: 0 for no decisions, or the most workers of the pool")
        if most and least > most:
            raise ConfigError(
                f"--min-{pool} {least} is above --max-{pool} {most}: lower it, or raise the most"
            )
    for name, seconds in (("--encoder-slo", config.encoder_slo), ("--scale-window", config.scale_window)):
        if not (math.isfinite(seconds) and 0.0 < seconds <= 86400.0):
            raise ConfigError(f"{name} {seconds:g}: give seconds, more than 0 and at most 86400")
    if config.scaler_port and not (config.max_encoders or config.max_pd_workers):
        raise ConfigError(
            "--scaler-port answers with decisions, and none is made: give --max-encoders or --max-pd-workers"
        )
