"""A vLLM server that a PD worker starts for itself, on loopback, and starts again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from triptych.base.config import PDConfig, internal_tls
from triptych.base.errors import ConfigError
from triptych.base.parent import supervised
from triptych.base.types import JsonObject
from triptych.models.identity import model_identity
from triptych.models.registry import family_of, resolve_dtype
from triptych.pd_worker.vllm.adapters import lora_flags, read_adapters
from triptych.pd_worker.vllm.gpus import EngineGpus
from triptych.pd_worker.vllm.kv_transfer import transfer_config
from triptych.pd_worker.vllm.pooled import pooling_flags

logger = logging.getLogger(__name__)

#: Seconds that SIGTERM has, and the pauses between starts.
END_SECONDS = 30.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: Our worker looks into the store before it calls vLLM: what is missing then comes from no one.
_WAIT_SECONDS = 2
_LOOK_SECONDS = 1.0


def with_dtype(config: PDConfig) -> PDConfig:
    """The same with --dtype auto resolved: encoders, this worker and vLLM name one."""
    dtype = resolve_dtype(Path(config.model), torch.device(config.device), config.dtype)
    return replace(config, dtype=str(dtype).removeprefix("torch."))


def server_args(
    config: PDConfig, port: int, store_file: str, total_memory: int, token_file: str = ""
) -> list[str]:
    """The words after `vllm`.

    `store_file` has the store's address, `token_file` the token; `total_memory` is the GPU's, in bytes.
    """
    namespace = model_identity(
        Path(config.model), dtype=config.dtype, revision=config.model_revision, quantization="none"
    ).namespace
    options: JsonObject = {
        "store_file": store_file,
        "namespace": namespace,
        "wait_seconds": _WAIT_SECONDS,
        "ends_with_parent": True,
    }
    if config.engine_class != "known":
        options["engine_class"] = config.engine_class
    if token_file:
        options["internal_token_file"] = token_file
    if (files := internal_tls(config)) is not None:
        options |= {"tls_cert_file": files.cert, "tls_key_file": files.key, "tls_ca_file": files.ca}
        options["tls_name"] = files.name
    transfer = {
        "ec_connector": "TriptychECConnector",
        "ec_connector_module_path": "triptych.integrations.vllm",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": options,
    }
    args = ["serve", config.model, "--host", "127.0.0.1", "--port", str(port), "--dtype", config.dtype]
    path = Path(config.model)
    args += ["--enable-scale-out", "--enable-mm-embeds", "--enable-prompt-tokens-details"]
    args += pooling_flags(path, family_of(path).architecture)
    # This worker asks for its health twice a second.
    args += ["--disable-uvicorn-access-log"]
    # Its tower never computes: nothing is measured with the largest picture, and no memory kept for that.
    args += ["--skip-mm-profiling", "--ec-transfer-config", json.dumps(transfer)]
    # Else the most that its memory has room for, where a checkpoint names more than any card holds.
    args += ["--max-model-len", str(config.max_model_len or "auto")]
    if config.max_num_seqs != PDConfig().max_num_seqs:
        args += ["--max-num-seqs", str(config.max_num_seqs)]
    if config.limit_mm_per_prompt:
        args += ["--limit-mm-per-prompt", config.limit_mm_per_prompt]
    if config.tensor_parallel > 1:
        args += ["--tensor-parallel-size", str(config.tensor_parallel)]
    if config.device_memory and total_memory:
        # Embeddings are beside what vLLM measures.
        share = (config.device_memory - config.embedding_memory) / total_memory
        args += ["--gpu-memory-utilization", f"{min(0.95, max(0.01, share)):.3f}"]
    if config.kv_memory:
        # vLLM's is of one rank.
        args += ["--kv-cache-memory-bytes", str(config.kv_memory // config.tensor_parallel)]
    args += lora_flags(read_adapters(config), config.device)
    args += _speculation(config)
    if config.kv_connector == "nixl":
        args += ["--kv-transfer-config", json.dumps(_kv_transfer(config))]
    if not config.prefix_caching:
        args += ["--no-enable-prefix-caching"]
    return args


#: What makes vLLM accept drafts that the model would not have put out: for measurements of speed.
_INEXACT = ("synthetic_acceptance_rates", "synthetic_acceptance_length")


def _speculation(config: PDConfig) -> list[str]:
    """vLLM's words of --speculative-config; what it holds, vLLM checks. ConfigError for what is not exact."""
    if not config.speculative_config:
        return []
    example = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
    try:
        given = json.loads(config.speculative_config)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not given:
        raise ConfigError(
            f"--speculative-config {config.speculative_config[:200]!r}: write a JSON object, like {example}"
        )
    if given.get("rejection_sample_method") == "synthetic" or any(given.get(name) for name in _INEXACT):
        raise ConfigError(
            "--speculative-config: synthetic acceptance puts out tokens that are not the model's: leave "
            "rejection_sample_method and synthetic_… out"
        )
    return ["--speculative-config", json.dumps(given)]


def _kv_transfer(config: PDConfig) -> JsonObject:
    transfer = transfer_config(config.role)
    return {**transfer, "kv_buffer_device": "cpu"} if config.device == "cpu" else transfer


def connector_environment(config: PDConfig) -> dict[str, str]:
    """Where other servers ask the KV connector of this one; empty without one."""
    if config.kv_connector == "none":
        return {}
    host = (config.advertise.rpartition(":")[0] or config.host).strip("[]")
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port())}


@asynccontextmanager
async def own_server(
    config: PDConfig, program: str, stop: asyncio.Event, token: str = ""
) -> AsyncIterator[PDConfig]:
    """Runs the server while the context lasts; the worker's flags with its address. `token` is for both.

    A server that ends before its first answer sets `stop`, and the context ends with a ConfigError.
    """
    with tempfile.TemporaryDirectory(prefix="triptych-vllm-") as folder:
        # No password on a command line, which every user of the machine may read.
        store_file = _secret_file(Path(folder) / "store", config.store)
        token_file = _secret_file(Path(folder) / "token", token) if token else ""
        port = _free_port()
        args = server_args(config, port, store_file, _total_memory(config.device), token_file)
        server = OwnServer([program, *args], port, EngineGpus(config), connector_environment(config))
        running = asyncio.create_task(server.run(stop), name="vLLM server")
        try:
            yield replace(config, engine_url=f"http://127.0.0.1:{port}")
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        if server.failed:
            raise ConfigError(server.failed)


def _secret_file(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return str(path)


_NONE: Mapping[str, str] = MappingProxyType({})


class OwnServer:
    """The process, started again when it ends after it has served. Until it listens it claims its `gpus`."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        gpus: EngineGpus,
        variables: Mapping[str, str] = _NONE,
    ) -> None:
        self._command = list(command)
        self._variables = variables
        self._port = port
        self._gpus = gpus
        #: Whether it has ever listened.
        self.served = False
        #: Why it was not started, or how it ended before it served; empty otherwise.
        self.failed = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Keeps it running until cancelled; sets `stop` when it ends before it has ever served."""
        pause, program = FIRST_PAUSE, " ".join(self._command[:2])
        while True:
            began = time.monotonic()
            try:
                await self._gpus.claim()
                process = await self._start()
                try:
                    code = await self._ended(process)
                finally:
                    await _end(process)
            except (ConfigError, OSError) as error:
                # There may be memory, a process id or a free GPU again.
                ended = failed = f"{error}" if isinstance(error, ConfigError) else f"{program}: {error}"
            else:
                ended = f"vLLM has ended with {code}"
                failed = f"vLLM ended with {code} before it served; its own lines are above: {program}"
            finally:
                self._gpus.release()
            if not self.served:
                self.failed = failed
                stop.set()
                return
            if time.monotonic() - began > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            logger.critical("%s: it is started again in %g s", ended, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _start(self) -> asyncio.subprocess.Process:
        command, environment = supervised(self._command)
        logger.info("starting vLLM: %s", " ".join(self._command[:3]))
        # A session of its own: Ctrl-C in the terminal reaches this worker, which drains before it ends vLLM.
        return await asyncio.create_subprocess_exec(
            *command,
            env={**environment, **self._gpus.environment, **self._variables},
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """The exit code, once it has one. Meanwhile looks whether it listens."""
        listens = False
        while True:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(process.wait(), None if listens else _LOOK_SECONDS)
            listens = await _listens(self._port)
            if listens:
                self.served = True
                self._gpus.release()


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, then SIGKILL to what has not ended in END_SECONDS."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_SECONDS)
    except TimeoutError:
        logger.warning("vLLM has not ended in %g s: it is killed", END_SECONDS)
        process.kill()
        await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), _LOOK_SECONDS)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _total_memory(device: str) -> int:
    if not device.startswith("cuda"):
        return 0
    return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)
