"""The flags of a cluster on one machine: its workers, its proxy, and how they share the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from triptych.base.config.flags import MIB, Config, flag, flags_of, part
from triptych.base.config.proxy import ProxyConfig
from triptych.base.config.worker import SHARING_FLAGS, EncoderConfig, PDConfig
from triptych.base.errors import ConfigError
from triptych.base.scaling import ScalingTarget

#: Workers of one pool on one machine, at most.
MAX_WORKERS = 64
_NUMBER = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """The least and the most workers of a pool, written like 4 (always four) or 0..4.

    A pool of a fixed number is not scaled. `WorkerRange(0, 0)`, written 0, leaves the number open.
    """

    minimum: int
    maximum: int

    @classmethod
    def fixed(cls, number: int) -> WorkerRange:
        """A pool that always has this many."""
        return cls(number, number)

    @property
    def scaled(self) -> bool:
        """Whether the number may change."""
        return self.minimum < self.maximum

    def clamp(self, workers: int) -> int:
        """The number in the range that is nearest to `workers`."""
        return max(self.minimum, min(workers, self.maximum))

    def __str__(self) -> str:
        return f"{self.minimum}..{self.maximum}" if self.scaled else str(self.maximum)


def parse_workers(text: str, flag: str, *, minimum: int, maximum: int, to_zero: bool) -> WorkerRange:
    """The range that `text` means for an option `flag`; ConfigError, with the remedy, where it means none.

    A fixed number is `minimum` to `maximum`; a range begins at 1, or where it may scale to zero at 0.
    """
    text = text[:40]
    first, dots, last = (part.strip() for part in text.partition(".."))
    begin = 0 if to_zero else 1
    if not _NUMBER.fullmatch(first) or (dots and not _NUMBER.fullmatch(last)):
        raise ConfigError(f"{flag} {text}: write a number of workers, like 2, or a range, like {begin}..4")
    fewest, highest = int(first), int(last if dots else first)
    if fewest > highest:
        raise ConfigError(
            f"{flag} {text}: the minimum is above the maximum; write {max(highest, begin)}..{fewest}"
        )
    if highest > maximum:
        raise ConfigError(f"{flag} {text}: at most {maximum} workers of a kind stand on one machine")
    if dots and highest == 0:
        raise ConfigError(f"{flag} {text}: the maximum is at least 1, like {begin}..1")
    if dots and fewest < begin:
        raise ConfigError(f"{flag} {text}: the minimum is at least {begin}; write {begin}..{highest}")
    if not dots and highest < minimum:
        zero = f"; {flag} 0..1 starts one when there is work" if to_zero else ""
        raise ConfigError(f"{flag} {text}: at least {minimum}{zero}")
    return WorkerRange(fewest, highest)


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
        1, "number of proxies; each further one uses --port and --grpc-port plus 10", minimum=1, maximum=16
    )
    ray_resources: str = flag(
        "",
        "TOML file with the resources that Ray reserves per worker of each pool; default: one CPU, or one"
        " GPU on CUDA",
    )
    start_timeout: float = flag(
        600.0, "seconds until all workers that always run must be placed and registered", minimum=1
    )


def check_no_ray(config: RayConfig) -> None:
    """ConfigError for a flag of Ray's where another launcher is chosen."""
    for one in flags_of(RayConfig):
        if getattr(config, one.name) != one.default:
            raise ConfigError(f"{one.option} is for --launcher ray: say that too, or leave it out")


#: Flags of workers that the cluster gives them.
_GIVEN = (
    *("store", "store_password_file", "store_ca_file", "store_cert_file", "store_key_file"),
    *("internal_token", "internal_token_file", "log_level", "log_format", "otlp_endpoint", "trace_sample"),
    *("tls_cert_file", "tls_key_file", "tls_ca_file", "tls_name", "insecure"),
    *(
        "ec_transfer_port",
        "metrics_port",
        "host",
        "port",
        "advertise",
        "cpus",
        "drain_timeout",
        *SHARING_FLAGS,
    ),
    *("engine_url", "engine_key_file", "role"),
)

#: Flags of the proxy that --encoders and --pd-workers give.
_RANGES = ("min_encoders", "max_encoders", "min_pd_workers", "max_pd_workers", "scale")


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
        minimum=1,
        maximum=MAX_WORKERS,
        to_zero=True,
    )
    pd_workers: WorkerRange = flag(
        WorkerRange.fixed(1),
        "PD workers; a range like 1..3 is autoscaled",
        minimum=1,
        maximum=MAX_WORKERS,
    )
    prefill_workers: WorkerRange = flag(
        WorkerRange.fixed(0),
        "PD workers that compute prompts, in place of --pd-workers; with --decode-workers; a range like 1..3 "
        "is autoscaled",
        minimum=0,
        maximum=MAX_WORKERS,
    )
    decode_workers: WorkerRange = flag(
        WorkerRange.fixed(0),
        "PD workers that take requests over from --prefill-workers, and short prompts whole; a range like "
        "1..3 is autoscaled",
        minimum=0,
        maximum=MAX_WORKERS,
    )
    topology: str = flag(
        "epd",
        "epd: separate encoder and PD workers; colocated: replicas that are both in one process",
        choices=("epd", "colocated"),
    )
    replicas: int = flag(1, "number of replicas, with --topology colocated", minimum=1, maximum=MAX_WORKERS)
    store_memory: int = flag(
        512 * MIB, "memory of the store that --store auto starts", size=True, minimum=4 * MIB
    )

    @property
    def counts(self) -> WorkerCounts:
        """How many processes of which kind the cluster has at most: what is planned for."""
        if self.topology == "colocated":
            return WorkerCounts(replicas=self.replicas)
        return WorkerCounts(encoders=self.encoders.maximum, pd_workers=self.pools["pd"].maximum)

    @property
    def pools(self) -> dict[str, WorkerRange]:
        """How many workers of each pool are registered; a replica is in both."""
        if self.topology == "colocated":
            return {"encoder": WorkerRange.fixed(self.replicas), "pd": WorkerRange.fixed(self.replicas)}
        roles = self.roles.values()
        pd = WorkerRange(sum(each.minimum for each in roles), sum(each.maximum for each in roles))
        return {"encoder": self.encoders, "pd": pd if pd.maximum else self.pd_workers}

    @property
    def roles(self) -> dict[str, WorkerRange]:
        """How many PD workers have each role; none where each does all."""
        both = {"prefill": self.prefill_workers, "decode": self.decode_workers}
        return {role: workers for role, workers in both.items() if workers.maximum}

    @property
    def scaled(self) -> dict[str, WorkerRange]:
        """The ranges, by the name of the target of scaling: a pool, or a role of its workers."""
        if self.topology == "colocated":
            return {}
        apart = {ScalingTarget("pd", role=role).name: workers for role, workers in self.roles.items()}
        targets = {"encoder": self.encoders, **(apart or {"pd": self.pd_workers})}
        return {name: workers for name, workers in targets.items() if workers.scaled}

    def role(self, number: int) -> str:
        """The role of the PD worker `pd-NUMBER`: those that compute prompts come first."""
        if not self.prefill_workers.maximum:
            return self.pd.role
        return "prefill" if number < self.prefill_workers.maximum else "decode"

    @property
    def ranks(self) -> dict[str, int]:
        """Ranks of one worker of each kind, each with a device; a replica's two sides share theirs."""
        pd, encoder = self.pd.tensor_parallel, self.encoder.encoder_data_parallel
        return {"encoder": encoder, "pd": pd, "colocated": max(pd, encoder)}

    @property
    def swap_memory(self) -> int:
        """Host memory for swapped blocks in each PD worker; 0 where requests are computed again."""
        return self.pd.swap_memory if self.pd.preemption == "swap" else 0


def check_scaled(config: ClusterConfig) -> None:
    """ConfigError for a range of workers in a topology that has none, and for roles that cannot be."""
    _check_roles(config)
    if config.topology == "colocated" and config.pd.engine == "vllm":
        raise ConfigError("--engine vllm is for --topology epd: replicas compute themselves; leave it out")
    for name in ("lora_modules", "speculative_config"):
        if config.topology == "colocated" and getattr(config.pd, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for --topology epd with --engine vllm: replicas compute "
                "themselves; leave it out"
            )
    for option, given in (("--encoders", config.encoders), ("--pd-workers", config.pd_workers)):
        if config.topology == "colocated" and given.scaled:
            raise ConfigError(
                f"{option} {given} is for --topology epd: replicas keep to a fixed number, like "
                f"--replicas {given.maximum}"
            )


def _check_roles(config: ClusterConfig) -> None:
    """ConfigError for roles of PD workers that cannot work together."""
    roles = {"--prefill-workers": config.prefill_workers, "--decode-workers": config.decode_workers}
    given = [option for option, workers in roles.items() if workers.maximum]
    if not given:
        return
    if len(given) < len(roles):
        [missing] = roles.keys() - set(given)
        raise ConfigError(f"{given[0]} needs {missing} too: give both, like 1, or --pd-workers alone")
    if config.topology == "colocated":
        raise ConfigError(f"{given[0]} is for --topology epd: leave it out, or take --topology colocated out")
    if config.pd_workers != WorkerRange.fixed(1):
        raise ConfigError(
            f"--pd-workers {config.pd_workers} is in the place of {' and '.join(given)}: leave it out"
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
        minimum=0,
        maximum=MAX_WORKERS,
        to_zero=True,
        shown="with --cpu-sharing pace, which auto is on CPUs, one per core, up to 4; else 1",
    )
    cpus_per_worker: int = flag(
        0, "cores reserved for each worker; 0: all workers share all cores", minimum=0, maximum=1024
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
        minimum=0,
        maximum=1,
    )
    encoder_threads: int = flag(
        0,
        "torch threads of an encoder worker",
        minimum=0,
        maximum=1024,
        shown="--threads; with --cpu-sharing pace cores by encoders, two at least",
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


@dataclass(frozen=True, slots=True)
class ModelCheckConfig(ClusterConfig):
    """Those of a cluster, to be checked for a model, and what to measure it with."""

    pictures: str = flag(
        "", "folder of photographs, for which the loss by --ec-store-rows int8 is measured: of logits, as KL"
    )


@dataclass(frozen=True, slots=True)
class DoctorConfig(ServeConfig):
    """Those of `triptych serve`, to be checked, and the address of a running cluster or a release's name."""

    url: str = flag("", "a running cluster to ask, like http://10.0.0.5:8000; its ports are then not tried")
    cluster: str = flag(
        "",
        "a release of the Helm chart, NAME or NAMESPACE/NAME: only whether the claims, classes, secrets, "
        "node labels and GPUs that its pods wait for are there is then checked, by kubectl",
    )
