"""The flags of workers: those that both kinds have, and of each kind its own."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.config.flags import (
    EMBEDDING_MEMORY,
    KIB,
    MAX_PORT,
    MIB,
    MOMENT,
    STATE_MEMORY,
    Config,
    flag,
    part,
)
from triptych.base.config.service import ServiceConfig

#: Values of --ec-transfer.
EC_TRANSFERS = ("auto", "store")
#: Values of --encoder-graphs and --decode-graphs.
GRAPH_MODES = ("off", "static", "cuda", "auto")


@dataclass(frozen=True, slots=True)
class WorkerConfig(ServiceConfig):
    """The flags that both kinds of worker have. `model` is a checkpoint folder."""

    model: str = ""
    served_model_name: str = flag("", "model name that clients use; default: the folder's name")
    model_revision: str = flag(
        "", "name of the weights' version in cache keys; default: a digest of the weights"
    )
    host: str = flag("127.0.0.1", "address to bind the worker's gRPC server to")
    port: int = flag(0, "port of the worker's gRPC server; 0 picks a free one", minimum=0, maximum=MAX_PORT)
    advertise: str = flag("", "host:port at which proxies reach this worker; default: the bound address")
    ec_transfer: str = flag(
        "auto",
        "path of embeddings from encoder to PD workers: auto, shared memory or a connection between the two, "
        "else the store; store, the store only",
        choices=EC_TRANSFERS,
    )
    device: str = flag("cpu", "torch device: cpu, cuda or cuda:N")
    device_memory: int = flag(
        0,
        "memory of its device that a worker may use in all; auto: 0.9 of what is free on a GPU at "
        "startup, half of the free memory of the machine or cgroup on a CPU",
        size=True,
        auto=True,
        minimum=0,
    )
    dtype: str = flag(
        "auto",
        "dtype of weights and embeddings; auto: the checkpoint's on CUDA, float32 on CPU (set bfloat16 to"
        " keep 16 bits there)",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    pipeline_parallel: int = flag(1, "pipeline-parallel size; only 1 is supported", minimum=1)
    speculative_model: str = flag("", "draft model for speculative decoding; not supported")
    kv_cache_dtype: str = flag(
        "auto", "dtype of the KV cache; auto: that of --dtype; fp8 is not supported", choices=("auto", "fp8")
    )
    quantization: str = flag(
        "none",
        "8-bit linear layers, quantized while weights load: int8 for encoder and PD workers, int8-decoder"
        " for PD workers only; w8a8 and w8a8-decoder also round activations to 8 bits, on CPUs; all "
        "workers of a model need the same value",
        choices=("none", "int8", "int8-decoder", "w8a8", "w8a8-decoder"),
    )
    threads: int = flag(0, "torch threads; 0: chosen automatically", minimum=0, maximum=1024)
    worker_kind: str = flag(
        "",
        "name of this kind of machine or device; proxies learn encoding costs separately for each name",
        shown="what the device says of itself, like cuda NVIDIA H200",
    )
    core_page: str = flag(
        "", "shared file in which the workers of one machine publish whose threads are computing"
    )
    core_slot: int = flag(0, "slot of this worker in --core-page", minimum=0)
    spare_cores: bool = flag(
        False,
        "adapt threads to the cores that other workers on --core-page leave idle: more for a tower, fewer"
        " for a decoder",
    )


@dataclass(frozen=True, slots=True)
class EncoderConfig(WorkerConfig):
    """The flags of an encoder worker."""

    max_image_pixels: int = flag(
        40_000_000, "largest image in pixels (width times height) before resizing", minimum=1
    )
    max_audio_seconds: float = flag(
        1800.0, "longest audio file; each second takes 0.5 MiB during preprocessing", minimum=MOMENT
    )
    max_video_seconds: float = flag(600.0, "longest video", minimum=MOMENT)
    max_video_pixels: int = flag(
        256_000_000,
        "pixels of all frames that are sampled of a video, before resizing; each takes 3 bytes",
        minimum=1,
    )
    max_decode_seconds: float = flag(
        30.0,
        "longest decode of an image, audio or video file, as its header and index say: in seconds of a core "
        "of this machine, whose speed is measured at the start",
        minimum=1,
    )
    video_segment_frames: int = flag(
        30,
        "sampled frames of a video that are one item, where the model's tower takes them apart from the rest;"
        " 0: a video is one item",
        minimum=0,
    )
    encoder_batch_patches: int = flag(
        0,
        "patches per rank in one encoder batch, summed over its items; 0: 512 on a CPU, else 16384",
        minimum=0,
    )
    encoder_data_parallel: int = flag(
        1,
        "data-parallel ranks of one encoder worker: processes that each hold the whole tower and share "
        "every batch, with one GPU each or a part of --threads",
        minimum=1,
        maximum=64,
    )
    encoder_graphs: str = flag(
        "auto",
        "capture tower calls of a few fixed sizes at startup: cuda, as CUDA graphs (never run on a GPU "
        "yet); static, the same buffers without a graph, for tests; auto, cuda on a GPU if capture "
        "succeeds, else off",
        choices=GRAPH_MODES,
    )
    encoder_graph_budgets: str = flag(
        "",
        "sizes of the encoder graphs in output rows, separated by commas",
        shown="from the smallest that pays, doubled up to --encoder-batch-patches",
    )
    encoder_graph_max_items: int = flag(
        0, "most items in one encoder graph; 0: the largest size divided by the smallest", minimum=0
    )
    encoder_graph_max_frames: int = flag(
        0,
        "most frames, a picture being one, in one encoder graph; 0: those of a segment of a video",
        minimum=0,
    )
    plan_credit: int = flag(16, "jobs that may be in preprocessing or queued for it", minimum=1)
    tower_credit: int = flag(8, "jobs per rank that may be queued for the tower or run in it", minimum=1)
    prepared_memory: int = flag(
        512 * MIB, "host memory for decoded and preprocessed media", size=True, minimum=KIB
    )
    encoder_media_memory: int = flag(
        256 * MIB,
        "host memory for media that are queued for preprocessing; a single larger item may exceed it",
        size=True,
        minimum=KIB,
    )
    decode_threads: int = flag(
        0,
        "threads that decode media; auto: as many as the worker has cores",
        auto=True,
        minimum=0,
        maximum=1024,
    )
    ec_transfer_memory: int = flag(
        256 * MIB, "shared memory for embeddings that PD workers read from this worker", size=True, minimum=0
    )
    ec_transfer_port: int = flag(
        0,
        "port at which PD workers of other hosts read embeddings; 0 picks a free one",
        minimum=0,
        maximum=MAX_PORT,
    )
    ec_store_rows: str = flag(
        "dtype",
        "form of embeddings in store and transfers: dtype, that of --dtype; int8, in 8 bits with a scale for "
        "each row and deepstack level: half of 16 bits; PD workers read both (`triptych check` measures "
        "what it costs)",
        choices=("dtype", "int8"),
    )
    embedding_ttl: float = flag(3600.0, "seconds that an unused embedding stays in the store", minimum=MOMENT)

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
        "auto",
        "inference engine: native, Triptych's own; vllm, the vLLM server at --engine-url, else one that the "
        "worker starts for itself; auto, vllm for decoder-only models on CUDA where vLLM is installed, "
        "else native; both load embeddings through an EC connector",
        choices=("auto", "native", "vllm"),
    )
    engine_url: str = flag("", "URL of a vLLM server, like http://10.0.0.7:8000; default: one is started")
    engine_key_file: str = flag("", "file with the API key of that vLLM server (its --api-key)")
    lora_modules: str = flag(
        "",
        "LoRA adapters of the language model as PEFT saves them, NAME=DIR each, which clients name as a "
        "model; with --engine vllm",
        joined=True,
    )
    speculative_config: str = flag(
        "",
        'vLLM\'s speculative decoding, as its JSON: {"method": "ngram", "num_speculative_tokens": 4, '
        '"prompt_lookup_max": 4}; with --engine vllm, of the worker\'s own vLLM',
    )
    chat_template: str = flag(
        "",
        "file with a chat template (Jinja) in place of the checkpoint's, the same for all PD workers of a "
        "model; a model without any serves prompts alone",
    )
    reasoning_parser: str = flag(
        "auto",
        "markers of the model's reasoning, which replies have as reasoning_content: auto, by the chat "
        "template; think, mistral, gemma4, kimi or vLLM's name of a parser; none, the output is all content",
    )
    tool_call_parser: str = flag(
        "auto",
        "format of the model's tool calls: auto, by the chat template, or vLLM's name of a parser "
        "(docs/api.md has them)",
    )
    schemas: str = flag(
        "closed",
        "JSON schemas of output formats and forced tool calls: closed, objects take no names but those that "
        "are written, and numbers, strings and lists have a bound, unless the schema says otherwise; open, "
        "as JSON Schema has them, so that a weak model may never end",
        choices=("closed", "open"),
    )
    tensor_parallel: int = flag(
        1,
        "tensor-parallel size of a PD worker: processes that each hold a part of every layer, with one "
        "GPU each or a part of the cores",
        minimum=1,
        maximum=64,
    )
    max_model_len: int = flag(
        0,
        "most tokens of prompt plus output; 0: the checkpoint's limit, at most 32768 and what --kv-memory"
        " holds",
        minimum=0,
    )
    max_num_seqs: int = flag(64, "most requests that run at once", minimum=1)
    max_num_batched_tokens: int = flag(
        0, "token budget of one engine step; 0: 512 on a CPU, else 8192", minimum=0
    )
    block_size: int = flag(16, "tokens per KV block", minimum=1)
    kv_memory: int = flag(
        0,
        "memory for the KV cache over all ranks (a CPU uses a quarter more); auto: what remains of "
        "--device-memory at startup, at most what --max-num-seqs requests can use",
        size=True,
        auto=True,
        minimum=0,
    )
    encoder_cache_memory: int = flag(
        0,
        "memory for embeddings in each rank of a PD worker, and the same again for copies in host memory;"
        " auto: an eighth of what --device-memory leaves, at most what --max-num-seqs requests can use; "
        "256MiB if memory is not measured, as with --kv-memory on a CPU",
        size=True,
        auto=True,
        minimum=0,
    )
    limit_mm_per_prompt: str = flag(
        "",
        'maximum numbers of items in a prompt, as JSON: {"image": 4, "video": 0}; with the largest item of '
        'both ({"count": 1, "num_frames": 32, "width": 448, "height": 448}), --encoder-cache-memory auto '
        "counts their embeddings in place of those of a prompt full of the densest items",
    )
    state_memory: int = flag(
        0,
        "memory for the states of recurrent layers, if the model has any: a slot for each running request,"
        " and snapshots for prefix caching; auto: a quarter of what is left for it and the KV cache, at "
        "most two slots for each of --max-num-seqs; 256MiB if memory is not measured",
        size=True,
        auto=True,
        minimum=0,
    )
    engine_class: str = flag(
        "known",
        "classes that are served with --engine vllm: known, those whose rows were compared with vLLM's; "
        "generic, also another one for its pictures, once at the start the tokens that vLLM writes for a "
        "picture are those of this worker; the values of its rows are not compared",
        choices=("known", "generic"),
    )
    role: str = flag(
        "both",
        "prefill: computes prompts, and hands requests over to decode workers, which take these; both: as "
        "ever; what a role has no worker for goes to the others",
        choices=("both", "prefill", "decode"),
    )
    kv_connector: str = flag(
        "none",
        "how the KV of a prompt gets from the vLLM of a prefill worker to that of a decode worker, with "
        "--engine vllm: none, it is computed again; nixl, by vLLM's NixlConnector, which a vLLM of the "
        "worker's own is started with",
        choices=("none", "nixl"),
    )
    prefix_caching: bool = flag(True, "reuse the KV blocks of equal prompt prefixes")
    share_prefixes: str = flag(
        "off",
        "keep the KV blocks of prompts in the store, where all PD workers of the model find them: off; on; "
        "auto, while loading takes less time than computing, as measured",
        choices=("off", "on", "auto"),
    )
    kv_store: str = flag(
        "",
        "a store of their own for KV blocks, as --store; default: a part of --store",
        secret=True,
    )
    kv_store_share: float = flag(
        0.25, "the part of the memory of --store that KV blocks may take, 0 to 1", minimum=0, maximum=1
    )
    share_memory: int = flag(
        256 * MIB,
        "host memory for KV blocks on their way to and from the store, with --share-prefixes",
        size=True,
        minimum=0,
    )
    overlap_prefill: bool = flag(
        False,
        "prefill a prompt up to its first missing item while its other items are still being encoded; "
        "needs --prefix-caching",
    )
    step_interval: float = flag(
        0.02,
        "least seconds between the starts of two engine steps while workers on --core-page lack cores",
        minimum=0,
        maximum=1,
    )
    keep_core: bool = flag(
        False, "pin a single-threaded worker on --core-page to its own core while no other worker computes"
    )
    preemption: str = flag(
        "recompute",
        "how preempted requests continue: recompute their KV blocks, or swap them to host memory",
        choices=("recompute", "swap"),
    )
    swap_memory: int = flag(
        256 * MIB, "host memory for swapped KV blocks, with --preemption swap", size=True, minimum=0
    )
    attention_backend: str = flag(
        "auto",
        "triton: a kernel that reads keys and values in their blocks, for CUDA (never run on a GPU yet); "
        "cpu: the same for a CPU, in C++; sdpa: torch's attention, for which they are gathered; auto: triton "
        "on a GPU, cpu on a CPU, else sdpa",
        choices=("auto", "triton", "cpu", "sdpa"),
    )
    linear_kernel: str = flag(
        "auto",
        "product of up to 32 rows of bfloat16 on a CPU, with AMX of all: triptych, our own kernel; onednn; "
        "auto: the faster one for each size, measured at the first start on a machine",
        choices=("auto", "triptych", "onednn"),
    )
    decode_graphs: str = flag(
        "off",
        "how decode-only steps run: off, operator by operator; cuda, as CUDA graphs (never run on a GPU "
        "yet); static, in static buffers without a graph; auto, cuda on a GPU, else off",
        choices=GRAPH_MODES,
    )

    @property
    def step_tokens(self) -> int:
        """--max-num-batched-tokens, or what suits the device: a GPU takes many tokens as fast as few."""
        return self.max_num_batched_tokens or (512 if self.device == "cpu" else 8192)

    @property
    def saves_kv(self) -> bool:
        """Whether KV blocks of prompts go into the store; for those that take its requests over, too."""
        return self.share_prefixes != "off" or self.role == "prefill"

    @property
    def looks_for_kv(self) -> bool:
        """Whether requests look for KV blocks in the store before they are computed."""
        return self.share_prefixes != "off" or self.role == "decode"

    @property
    def embedding_memory(self) -> int:
        """Bytes for embeddings, as given or as found at the start."""
        return self.encoder_cache_memory or EMBEDDING_MEMORY

    @property
    def states_memory(self) -> int:
        """Bytes for states of recurrent layers, as given or as found at the start."""
        return self.state_memory or STATE_MEMORY


#: Of PD workers alone: replicas compute themselves.
ENGINE_FLAGS = (
    "engine",
    "engine_url",
    "engine_key_file",
    "engine_class",
    "lora_modules",
    "speculative_config",
    "role",
    "kv_connector",
)
#: How encoders and PD workers share cores, by flag; a replica's sides take turns instead.
SHARING_FLAGS = ("core_page", "core_slot", "spare_cores", "step_interval", "keep_core")


@dataclass(frozen=True, slots=True)
class ColocatedConfig(Config):
    """The flags of a replica: an encoder worker and a PD worker; what both have is equal in both."""

    encoder: EncoderConfig = part(EncoderConfig, without=SHARING_FLAGS)
    pd: PDConfig = part(PDConfig, without=(*SHARING_FLAGS, *ENGINE_FLAGS))
    connector: str = flag(
        "redis",
        "path of embeddings from tower to decoder: redis, the store that replicas share; memory, inside "
        "this process, for a single replica",
        choices=("redis", "memory"),
    )
    store_memory: int = flag(
        512 * MIB, "memory for embeddings in this process, with --connector memory", size=True, minimum=MIB
    )
