"""The flags of a cluster on one machine: its workers, its proxy, and how they share the machine."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.config.flags import Config, flag, part
from triptych.base.config.memory import MIB
from triptych.base.config.proxy import ProxyConfig
from triptych.base.config.ray import RayConfig
from triptych.base.config.worker import ENGINE_FLAGS, SHARING_FLAGS, EncoderConfig, PDConfig
from triptych.base.config.worker_range import MOST_WORKERS, WorkerRange
from triptych.base.errors import ConfigError

#: Flags of workers that the cluster gives them.
_GIVEN = (
    *("store", "store_password_file", "store_ca_file", "store_cert_file", "store_key_file"),
    *("internal_token", "internal_token_file", "log_level", "log_format", "otlp_endpoint", "trace_sample"),
    *("tls_cert_file", "tls_key_file", "tls_ca_file", "tls_name", "insecure"),
    *("metrics_port", "host", "port", "advertise", "cpus", "drain_timeout", *SHARING_FLAGS),
    *ENGINE_FLAGS,
)

#: Flags of the proxy that --encoders and --pd-workers give.
_RANGES = ("min_encoders", "max_encoders", "min_pd_workers", "max_pd_workers")


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """How many workers of each kind a cluster has: encoders and PD workers, or replicas that are both."""

    encoders: int = 0
    pd_workers: int = 0
    replicas: int = 0

    @property
    def workers(self) -> int:
        """Processes that hold a model."""
        return self.encoders + self.pd_workers + self.replicas

    @property
    def encoding(self) -> int:
        """Processes with a tower; as many registrations of the encoder pool."""
        return self.encoders + self.replicas

    @property
    def decoding(self) -> int:
        """Processes with a decoder; as many registrations of the PD pool."""
        return self.pd_workers + self.replicas

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each worker, by its name: pd-0, pd-1, encoder-0, or colocated-0."""
        counts = {"pd": self.pd_workers, "encoder": self.encoders, "colocated": self.replicas}
        return {f"{kind}-{index}": kind for kind, count in counts.items() for index in range(count)}


@dataclass(frozen=True, slots=True)
class ClusterConfig(Config):
    """The flags of a cluster's workers. What both kinds have is equal in both."""

    model: str = ""
    encoder: EncoderConfig = part(EncoderConfig, without=_GIVEN)
    pd: PDConfig = part(PDConfig, without=_GIVEN)
    encoders: WorkerRange = flag(
        WorkerRange.fixed(1),
        "encoder workers; a range like 0..4 is autoscaled",
        least=1,
        most=MOST_WORKERS,
        to_zero=True,
    )
    pd_workers: WorkerRange = flag(
        WorkerRange.fixed(1),
        "PD workers; a range like 1..3 is autoscaled",
        least=1,
        most=MOST_WORKERS,
    )
    topology: str = flag(
        "epd",
        "epd: separate encoder and PD workers; colocated: replicas that are both in one process",
        choices=("epd", "colocated"),
    )
    replicas: int = flag(1, "number of replicas, with --topology colocated", least=1, most=MOST_WORKERS)
    store_memory: int = flag(512 * MIB, "memory of the store that --store auto starts", size=True)

    @property
    def counts(self) -> WorkerCounts:
        """How many processes of which kind the cluster has at most: what is planned for."""
        if self.topology == "colocated":
            return WorkerCounts(replicas=self.replicas)
        return WorkerCounts(encoders=self.encoders.most, pd_workers=self.pd_workers.most)

    @property
    def pools(self) -> dict[str, WorkerRange]:
        """How many workers of each pool are registered; a replica is in both."""
        if self.topology == "colocated":
            return {"encoder": WorkerRange.fixed(self.replicas), "pd": WorkerRange.fixed(self.replicas)}
        return {"encoder": self.encoders, "pd": self.pd_workers}

    @property
    def ranks(self) -> dict[str, int]:
        """Processes of one worker of each kind; a replica is always one."""
        pd, encoder = self.pd.tensor_parallel, self.encoder.encoder_data_parallel
        return {"encoder": encoder, "pd": pd, "colocated": 1}

    @property
    def swap_memory(self) -> int:
        """Host memory for swapped blocks in each PD worker; 0 where requests are computed again."""
        return self.pd.swap_memory if self.pd.preemption == "swap" else 0


def check_scaled(config: ClusterConfig) -> None:
    """ConfigError for a range of workers, or several ranks, in a topology that has none."""
    if config.topology == "colocated" and config.encoder.encoder_data_parallel != 1:
        raise ConfigError(
            f"--encoder-data-parallel {config.encoder.encoder_data_parallel} is for --topology epd: a "
            "replica's tower has one rank; raise --replicas"
        )
    for option, given in (("--encoders", config.encoders), ("--pd-workers", config.pd_workers)):
        if config.topology == "colocated" and given.scaled:
            raise ConfigError(
                f"{option} {given} is for --topology epd: replicas keep to a fixed number, like "
                f"--replicas {given.most}"
            )
    if config.topology == "colocated" and config.pd.tensor_parallel > 1:
        raise ConfigError(
            f"--tensor-parallel {config.pd.tensor_parallel} is for --topology epd: a replica's tower and "
            "decoder are in one process; give --tensor-parallel 1"
        )


@dataclass(frozen=True, slots=True)
class ServeConfig(ClusterConfig):
    """The flags of a whole cluster on one machine."""

    proxy: ProxyConfig = part(
        ProxyConfig, without=("store", "store_memory", "cpus", "drain_timeout", *_RANGES)
    )
    launcher: str = flag(
        "local",
        "local: processes on this machine; ray: Ray actors on any number of machines",
        choices=("local", "ray"),
    )
    ray: RayConfig = part(RayConfig)
    demo: str = flag(
        "",
        "bundled model to serve: images answers questions about drawn shapes, audio transcribes dial tones",
        choices=("images", "audio"),
        shown="images, where no MODEL is given",
    )
    encoders: WorkerRange = flag(
        WorkerRange.fixed(0),
        "encoder workers; a range like 0..4 is autoscaled",
        least=0,
        most=MOST_WORKERS,
        to_zero=True,
        shown="1; with --cpu-sharing pace one per core, up to 4",
    )
    cpus_per_worker: int = flag(
        0, "cores reserved for each worker; 0: all workers share all cores", least=0, most=1024
    )
    cpu_sharing: str = flag(
        "auto",
        "free: every step starts at once; pace: PD workers run fewer steps with more sequences each while"
        " encoders lack cores; auto: pace if encoders and PD workers share CPUs, else free",
        choices=("auto", "free", "pace"),
    )
    step_interval: float = flag(
        0.02,
        "seconds between the starts of two steps while encoders lack cores, with --cpu-sharing pace",
        least=0,
        most=1,
    )
    encoder_threads: int = flag(
        0,
        "torch threads of an encoder worker",
        least=0,
        most=1024,
        shown="--threads; with --cpu-sharing pace all cores over all encoders",
    )
    store: str = flag(
        "auto",
        "auto starts a store; otherwise redis://host:port/0, rediss:// for TLS, or "
        "unix:///path/to/socket; if it contains a password, use the environment variable instead of the "
        "flag",
        secret=True,
    )
    run_dir: str = flag(
        "",
        "folder for the store's socket and cluster.json (names and process ids), readable only by you",
        shown="a new temporary folder",
    )
