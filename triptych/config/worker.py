"""The flags of workers: those that both kinds have, and of each kind its own."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.config.flags import Config, flag, part
from triptych.config.memory import EMBEDDING_MEMORY, MIB
from triptych.config.service import ServiceConfig

#: Values of --encoder-graphs and --decode-graphs.
GRAPH_MODES = ("off", "static", "cuda", "auto")


@dataclass(frozen=True, slots=True)
class WorkerConfig(ServiceConfig):
    """The flags that both kinds of worker have. `model` is a checkpoint folder."""

    model: str = ""
    served_model_name: str = flag("", "model name that clients use; the folder's name by default")
    model_revision: str = flag("", "names the weights in cache keys; their digest by default")
    host: str = flag("127.0.0.1", "address to bind the worker's gRPC server to")
    port: int = flag(0, "port of the worker's gRPC server; 0 picks a free one")
    advertise: str = flag("", "host:port that proxies reach this worker at; the bound one by default")
    device: str = flag("cpu", "torch device: cpu, cuda or cuda:N")
    device_memory: int = flag(
        0,
        "all memory that a worker may use of its device; auto: of what is free at the start 0.9 of a GPU's, "
        "half of the machine's or cgroup's",
        size=True,
        auto=True,
    )
    dtype: str = flag(
        "auto",
        "dtype of weights and embeddings; auto: the checkpoint's on CUDA, float32 for 16-bit float "
        "checkpoints on CPU unless bfloat16 is asked for",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    pipeline_parallel: int = flag(1, "workers that share one model's layers; only 1 is served")
    speculative_model: str = flag("", "a model that guesses ahead; not served")
    kv_cache_dtype: str = flag(
        "auto", "dtype of keys and values; auto: that of --dtype; fp8 is not served", choices=("auto", "fp8")
    )
    quantization: str = flag(
        "none",
        "linear layers in 8 bits, made when weights are loaded: int8 on both sides, int8-decoder on PD "
        "workers only; w8a8 and w8a8-decoder round their inputs, too, on CPUs; all workers of a model are "
        "given the same",
        choices=("none", "int8", "int8-decoder", "w8a8", "w8a8-decoder"),
    )
    threads: int = flag(0, "torch threads; 0 chooses")
    worker_kind: str = flag(
        "",
        "name of the machine or device; proxies learn what an item costs for each name apart",
        shown="what the device says of itself, like cuda NVIDIA H200",
    )
    core_page: str = flag("", "file in which the workers of one machine see whose threads compute")
    core_slot: int = flag(0, "this worker's place in --core-page")
    spare_cores: bool = flag(
        False, "threads follow what other workers on --core-page leave: a tower more, a decoder fewer"
    )


@dataclass(frozen=True, slots=True)
class EncoderConfig(WorkerConfig):
    """The flags of an encoder worker."""

    max_image_pixels: int = flag(40_000_000, "largest picture, width times height, before any resize")
    max_audio_seconds: float = flag(1800.0, "longest audio file; a second takes 0.5 MiB while it is prepared")
    encoder_batch_patches: int = flag(
        0, "patches in one encoder batch, over all its items, for each rank; 0: 512 on a CPU, else 16384"
    )
    encoder_data_parallel: int = flag(
        1,
        "ranks of one encoder worker: processes with all of the tower's weights, each on a GPU of its own or "
        "on a part of --threads, that share every batch",
    )
    encoder_graphs: str = flag(
        "off",
        "tower calls of a few fixed sizes, captured at the start: cuda, as CUDA graphs, which have never "
        "been run yet; static, the same buffers without a graph, for tests; auto, cuda on a GPU, where it "
        "can be captured",
        choices=GRAPH_MODES,
    )
    encoder_graph_budgets: str = flag(
        "",
        "output rows of those sizes, separated by commas",
        shown="from the smallest that pays, doubled up to --encoder-batch-patches",
    )
    encoder_graph_max_items: int = flag(
        0, "items in one of those calls; 0: as many as the smallest size goes into the largest", least=0
    )
    plan_credit: int = flag(16, "jobs that may be in preprocessing or waiting for it")
    tower_credit: int = flag(8, "jobs that may wait for the tower or run in it, for each of its ranks")
    prepared_memory: int = flag(512 * MIB, "host memory for preprocessed media", size=True)
    encoder_media_memory: int = flag(
        256 * MIB, "host memory for media that wait for preprocessing; a larger item has it alone", size=True
    )
    decode_threads: int = flag(2, "threads that decode media")
    embedding_ttl: float = flag(3600.0, "seconds that an unused embedding stays in the store")

    @property
    def batch_patches(self) -> int:
        """--encoder-batch-patches, or what suits the device.

        A CPU is busy with one picture: in a larger batch all of them are done when the last one is.
        """
        return self.encoder_batch_patches or (512 if self.device == "cpu" else 16384)

    @property
    def tower_places(self) -> int:
        """--tower-credit of all ranks together."""
        return self.tower_credit * self.encoder_data_parallel


@dataclass(frozen=True, slots=True)
class PDConfig(WorkerConfig):
    """The flags of a PD worker."""

    engine: str = flag(
        "native",
        "what computes: native, this project's engine; vllm, the vLLM server at --engine-url or, without "
        "one, vLLM in this process; either loads embeddings by an EC connector",
        choices=("native", "vllm"),
    )
    engine_url: str = flag("", "address of the server of --engine vllm, like http://10.0.0.7:8000")
    engine_args: str = flag(
        "", 'more arguments of vLLM in this process, as JSON, named as in its Python API: {"seed": 1}'
    )
    engine_key_file: str = flag("", "file that holds the key of that server's --api-key")
    tensor_parallel: int = flag(
        1,
        "processes that share one PD worker's decoder, each with a part of every layer: one GPU each, or a "
        "part of the cores",
        least=1,
        most=64,
    )
    max_model_len: int = flag(
        0, "longest prompt plus output, tokens; 0: the checkpoint's, at most 32768 and what --kv-memory holds"
    )
    max_num_seqs: int = flag(64, "requests that run at once")
    max_num_batched_tokens: int = flag(512, "token budget of one engine step")
    block_size: int = flag(16, "tokens of one KV block")
    kv_memory: int = flag(
        0,
        "memory for the KV cache, over all ranks, on a CPU a quarter more; auto: what --device-memory "
        "leaves, as measured at the start, and no more than --max-num-seqs requests can use",
        size=True,
        auto=True,
    )
    encoder_cache_memory: int = flag(
        0,
        "memory for embeddings in each rank of a PD worker, and as much again for copies in host memory; "
        "auto: an eighth of what --device-memory leaves, and no more than --max-num-seqs requests can use; "
        "256MiB where nothing is measured, as with --kv-memory on a CPU",
        size=True,
        auto=True,
    )
    prefix_caching: bool = flag(True, "reuse KV blocks of equal prefixes")
    overlap_prefill: bool = flag(
        True,
        "prefill a prompt up to its first missing item while others of its items are still encoded; needs "
        "--prefix-caching",
    )
    step_interval: float = flag(
        0.02, "seconds between the beginnings of two steps, at least, while workers on --core-page lack cores"
    )
    keep_core: bool = flag(
        False, "a worker of one thread on --core-page keeps to a core of its own while no other computes"
    )
    preemption: str = flag(
        "recompute",
        "what becomes of a request whose KV blocks are needed: computed again, or swapped out to host memory",
        choices=("recompute", "swap"),
    )
    swap_memory: int = flag(256 * MIB, "host memory for swapped KV blocks, with --preemption swap", size=True)
    attention_backend: str = flag(
        "sdpa",
        "sdpa, torch's attention kernel; blockwise, blocks of keys one by one, which keeps no mask or bias "
        "as a whole; flex, FlexAttention, slow on a CPU, compiled on CUDA, where it has never been run yet; "
        "flashinfer, for CUDA and 16 bits with the package flashinfer-python, never run yet either",
        choices=("sdpa", "blockwise", "flex", "flashinfer"),
    )
    decode_graphs: str = flag(
        "off",
        "how steps of decodes alone run: off, operator by operator; cuda, as CUDA graphs, which have never "
        "been run yet; static, in their buffers but without a graph; auto, cuda on a GPU, else off",
        choices=GRAPH_MODES,
    )

    @property
    def embedding_memory(self) -> int:
        """Bytes for embeddings, as given or as found at the start."""
        return self.encoder_cache_memory or EMBEDDING_MEMORY


#: Of PD workers alone: a cluster on one machine and replicas compute themselves.
ENGINE_FLAGS = ("engine", "engine_url", "engine_args", "engine_key_file")
#: How encoders and PD workers share cores, by flag; a replica's sides take turns instead.
SHARING_FLAGS = ("core_page", "core_slot", "spare_cores", "step_interval", "keep_core")


@dataclass(frozen=True, slots=True)
class ColocatedConfig(Config):
    """The flags of a replica: an encoder worker and a PD worker; what both have is equal in both."""

    encoder: EncoderConfig = part(EncoderConfig, without=(*SHARING_FLAGS, "encoder_data_parallel"))
    pd: PDConfig = part(PDConfig, without=(*SHARING_FLAGS, *ENGINE_FLAGS, "tensor_parallel"))
    connector: str = flag(
        "redis",
        "where embeddings go from tower to decoder: redis, the store that replicas share; memory, this "
        "process, where it is the only one",
        choices=("redis", "memory"),
    )
    store_memory: int = flag(
        512 * MIB, "memory for embeddings in this process by --connector memory", size=True
    )
