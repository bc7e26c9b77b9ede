"""A vLLM of the worker's own, played by a program that listens: started, started again, ended."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from ast import literal_eval
from dataclasses import replace
from pathlib import Path

import pytest

from support.data.adapters import write_adapter
from support.data.checkpoints import build_checkpoint
from support.processes.cluster import free_port
from support.waiting import until
from triptych.base.config import GIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.device_probe import ProbedGpu
from triptych.base.machine.start_lock import StartLock
from triptych.base.parent import PARENT_VARIABLE
from triptych.integrations.vllm.options import parse_options
from triptych.models.identity import model_identity
from triptych.pd_worker.vllm import kv_transfer, own_server
from triptych.pd_worker.vllm.adapters import lora_flags, read_adapters
from triptych.pd_worker.vllm.gpus import EngineGpus
from triptych.pd_worker.vllm.own_server import OwnServer, server_args, with_dtype

STORE = "redis://user:secret@127.0.0.1:6379/0"
#: Writes its process id and arguments to a log, then runs the test's own lines.
PROGRAM = """#!{python}
import os, socket, sys, time
with open({log!r}, "a") as log:
    log.write(repr([os.getpid(), *sys.argv[1:]]) + "\\n")
port = int(sys.argv[sys.argv.index("--port") + 1])
{body}
"""
LISTENS = 'server = socket.create_server(("127.0.0.1", port)); time.sleep(600)'


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return build_checkpoint("qwen3_vl")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_server, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(own_server, "_LOOK_SECONDS", 0.05)


class Program:
    """The command, and what it has been started with so far."""

    def __init__(self, folder: Path, body: str) -> None:
        self.path, self._log = folder / "vllm", folder / "log"
        self._log.touch()
        self.path.write_text(PROGRAM.format(python=sys.executable, log=str(self._log), body=body))
        self.path.chmod(0o755)

    @property
    def starts(self) -> list[list[object]]:
        return [literal_eval(line) for line in self._log.read_text().splitlines()]

    @property
    def pids(self) -> list[int]:
        return [int(str(start[0])) for start in self.starts]


def config_of(checkpoint: Path, **flags: object) -> PDConfig:
    return with_dtype(PDConfig(model=str(checkpoint), store=STORE, engine="vllm", **flags))  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_it_listens_on_loopback_and_ends_with_the_context(checkpoint: Path, tmp_path: Path) -> None:
    program, stop = Program(tmp_path, LISTENS), asyncio.Event()
    async with own_server.own_server(config_of(checkpoint), str(program.path), stop) as config:
        await until(lambda: len(program.pids) == 1)
        words = [str(word) for word in program.starts[0][1:]]
        port = words[words.index("--port") + 1]
        assert config.engine_url == f"http://127.0.0.1:{port}"
        assert words[:4] == ["serve", str(checkpoint), "--host", "127.0.0.1"]
        assert "secret" not in " ".join(words)
    assert not alive(program.pids[0])
    assert not stop.is_set()


async def test_one_that_has_served_and_ends_is_started_again(tmp_path: Path) -> None:
    program, stop = Program(tmp_path, LISTENS), asyncio.Event()
    port = free_port()
    server = OwnServer([str(program.path), "--port", str(port)], port, EngineGpus(PDConfig()))
    running = asyncio.create_task(server.run(stop))
    try:
        await until(lambda: server.served, "the first server")
        os.kill(program.pids[0], 9)
        await until(lambda: len(program.pids) == 2, "the second server")
        assert not stop.is_set()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not alive(program.pids[1])


async def test_a_start_that_the_system_refuses_after_it_has_served_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program, stop = Program(tmp_path, LISTENS), asyncio.Event()
    port = free_port()
    server = OwnServer([str(program.path), "--port", str(port)], port, EngineGpus(PDConfig()))
    real, refusals = server._start, [OSError(11, "Resource temporarily unavailable")]

    async def refused() -> asyncio.subprocess.Process:
        if server.served and refusals:
            raise refusals.pop()
        return await real()

    monkeypatch.setattr(server, "_start", refused)
    running = asyncio.create_task(server.run(stop))
    try:
        await until(lambda: server.served, "the first server")
        os.kill(program.pids[0], 9)
        await until(lambda: len(program.pids) == 2 or running.done(), "the second server")
        assert not running.done() and not stop.is_set() and not refusals
        assert "Resource temporarily unavailable: it is started again" in caplog.text
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert server.failed == ""


async def test_one_that_ends_before_it_serves_ends_the_worker_with_a_sentence(checkpoint, tmp_path):
    program, stop = Program(tmp_path, "sys.exit(3)"), asyncio.Event()
    with pytest.raises(ConfigError, match="vLLM ended with 3 before it served"):
        async with own_server.own_server(config_of(checkpoint), str(program.path), stop):
            await asyncio.wait_for(stop.wait(), 45.0)
    assert len(program.pids) == 1


def test_the_connector_takes_the_configuration_that_it_is_given(checkpoint: Path, tmp_path: Path) -> None:
    config = config_of(
        checkpoint, max_num_seqs=7, max_model_len=99, device_memory=20 * GIB, kv_memory=GIB, tensor_parallel=2
    )
    file = tmp_path / "store"
    file.write_text(STORE)
    words = server_args(config, 8123, str(file), 80 * GIB)
    transfer = json.loads(words[words.index("--ec-transfer-config") + 1])
    options = parse_options(transfer["ec_connector_extra_config"])
    assert options.store == STORE
    expected = model_identity(checkpoint, dtype=config.dtype, revision="", quantization="none").namespace
    assert options.namespaces == (expected,)
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.247", "embeddings are beside it"
    for flag, value in (
        ("--max-num-seqs", "7"),
        ("--max-model-len", "99"),
        ("--kv-cache-memory-bytes", str(GIB // 2)),
        ("--tensor-parallel-size", "2"),
    ):
        assert words[words.index(flag) + 1] == value


def test_the_stores_address_is_for_its_user_alone(checkpoint: Path, tmp_path: Path) -> None:
    async def modes() -> list[int]:
        program = Program(tmp_path, LISTENS)
        async with own_server.own_server(config_of(checkpoint), str(program.path), asyncio.Event()):
            await until(lambda: len(program.pids) == 1)
            words = [str(word) for word in program.starts[0]]
            transfer = json.loads(words[words.index("--ec-transfer-config") + 1])
            file = Path(transfer["ec_connector_extra_config"]["store_file"])
            return [stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)]

    assert asyncio.run(modes()) == [0o600, 0o700]


def test_what_is_not_given_is_vllms_own(checkpoint: Path, tmp_path: Path) -> None:
    words = server_args(config_of(checkpoint), 8123, str(tmp_path / "store"), 80 * GIB)
    assert words[words.index("--max-model-len") + 1] == "auto"
    assert "--skip-mm-profiling" in words, "its tower never computes"
    for flag in ("--max-num-seqs", "--limit-mm-per-prompt", "--gpu-memory-utilization"):
        assert flag not in words


def test_limits_of_items_are_those_of_the_door(checkpoint: Path, tmp_path: Path) -> None:
    limits = '{"image": 4, "video": 0}'
    config = config_of(checkpoint, limit_mm_per_prompt=limits)
    words = server_args(config, 8123, str(tmp_path / "store"), 0)
    assert words[words.index("--limit-mm-per-prompt") + 1] == limits


async def test_its_kv_connector_listens_where_other_servers_reach_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "side-channel"
    names = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
    writes = f"open({str(file)!r}, 'w').write(' '.join(os.environ[name] for name in {names!r}))"
    program = Program(tmp_path, f"{writes}; {LISTENS}")
    config = config_of(checkpoint, kv_connector="nixl", advertise="10.0.0.7:50051")
    async with own_server.own_server(config, str(program.path), asyncio.Event()):
        await until(lambda: file.exists() and bool(file.read_text()), "its environment")
    host, port = file.read_text().split()
    assert host == "10.0.0.7" and 0 < int(port) < 65536
    words = [str(word) for word in program.starts[0]]
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "NixlConnector" and transfer["kv_buffer_device"] == "cpu"
    lease = transfer["kv_connector_extra_config"]["kv_lease_duration"]
    assert lease >= 3 * kv_transfer.KEPT_SECONDS, "blocks are still there when the last offer of them arrives"


def test_it_is_given_adapters_and_speculation(checkpoint: Path, tmp_path: Path) -> None:
    folder, drafts = (
        write_adapter(checkpoint, tmp_path / "sql", 1),
        {"method": "ngram", "num_speculative_tokens": 3},
    )
    config = config_of(checkpoint, lora_modules=f"sql={folder}", speculative_config=json.dumps(drafts))
    words = server_args(config, 8123, str(tmp_path / "store"), 0)
    given = lora_flags(read_adapters(config), "cpu")
    assert given and words[words.index("--enable-lora") :][: len(given)] == given
    assert json.loads(words[words.index("--speculative-config") + 1]) == drafts
    neither = server_args(config_of(checkpoint), 8123, str(tmp_path / "store"), 0)
    assert not {"--enable-lora", "--speculative-config"} & set(neither)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("ngram", "write a JSON object, like"),
        ("[]", "write a JSON object, like"),
        ("{}", "write a JSON object, like"),
        ('{"rejection_sample_method": "synthetic"}', "not the model's"),
        ('{"method": "ngram", "synthetic_acceptance_length": 2.5}', "not the model's"),
    ],
)
def test_speculation_that_is_none_or_not_exact_is_refused(given, reason, checkpoint, tmp_path) -> None:
    with pytest.raises(ConfigError, match=f"--speculative-config.*{reason}"):
        server_args(config_of(checkpoint, speculative_config=given), 8123, str(tmp_path / "store"), 0)


@pytest.mark.parametrize(
    "role, kv_role", [("prefill", "kv_producer"), ("decode", "kv_consumer"), ("both", "kv_consumer")]
)
def test_a_server_sends_kv_or_reads_it_by_the_workers_role(
    checkpoint: Path, tmp_path: Path, role: str, kv_role: str
) -> None:
    """vLLM drops `kv_both`; a worker of both roles takes requests over, and hands none over."""
    config = config_of(checkpoint, kv_connector="nixl", role=role)
    words = [str(word) for word in server_args(config, 8123, str(tmp_path / "store"), 0)]
    assert json.loads(words[words.index("--kv-transfer-config") + 1])["kv_role"] == kv_role


def test_without_a_connector_it_has_none(checkpoint: Path, tmp_path: Path) -> None:
    config = config_of(checkpoint)
    assert "--kv-transfer-config" not in server_args(config, 8123, str(tmp_path / "store"), 0)
    assert own_server.connector_environment(config) == {}


#: A worker's process: what its command line sets up, then a vLLM of its own that writes its environment.
WORKER = """
import asyncio, gc, os, sys
gc.disable()  # finds nothing among what is imported, and takes a fifth of its time
from triptych.base.config import PDConfig
from triptych.base.cpu.threads import library_environment
from triptych.base.log import setup_logging
from triptych.base.parent import set_variable

setup_logging("pd-0")
library_environment()
set_variable("OPENBLAS_NUM_THREADS", "1", replace=True)
assert "KMP_BLOCKTIME" in os.environ
from triptych.pd_worker.vllm.gpus import EngineGpus
from triptych.pd_worker.vllm.own_server import OwnServer

config = PDConfig(device=sys.argv[2], tensor_parallel=int(sys.argv[3]), device_memory=1)
asyncio.run(OwnServer([sys.argv[1]], 1, EngineGpus(config)).run(asyncio.Event()))
"""
WRITES = """#!{python}
import json, os
with open({log!r}, "w") as log:
    json.dump(dict(os.environ), log)
"""


def environment_of_vllm(folder: Path, given: dict[str, str], *words: str) -> dict[str, str]:
    """What a worker's vLLM has, where the worker was given `given`."""
    program, log = folder / "vllm", folder / "environment"
    program.write_text(WRITES.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    command = [sys.executable, "-c", WORKER, str(program), *words]
    subprocess.run(command, env=given, check=True, timeout=120)
    found: dict[str, str] = json.loads(log.read_text())
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "ACTIVE", "OPENBLAS_NUM_THREADS": "7"}])
def test_its_environment_is_the_one_that_the_worker_was_given(tmp_path: Path, own: dict[str, str]) -> None:
    given = {**os.environ, **own}
    for name in ("PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "GRPC_VERBOSITY", PARENT_VARIABLE):
        given.pop(name, None)
    found = environment_of_vllm(tmp_path, given, "cpu", "1")
    assert int(found.pop(PARENT_VARIABLE)) > 0
    # Set by Python itself where the locale is C.
    given.setdefault("LC_CTYPE", found.get("LC_CTYPE", ""))
    found.setdefault("LC_CTYPE", "")
    assert found == given


@pytest.mark.timeout(240)
def test_it_sees_the_gpus_of_its_ranks_in_the_workers_own_list(tmp_path: Path) -> None:
    given = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5,GPU-6,7"}
    assert environment_of_vllm(tmp_path, given, "cuda:2", "2")["CUDA_VISIBLE_DEVICES"] == "GPU-6,7"
    del given["CUDA_VISIBLE_DEVICES"]
    assert environment_of_vllm(tmp_path, given, "cuda:2", "2")["CUDA_VISIBLE_DEVICES"] == "2,3"


class FakeGpus(EngineGpus):
    """The GPUs of a machine without any, locked by a name of the test's."""

    def __init__(self, config: PDConfig, name: str, free: int = 80 * GIB) -> None:
        gpus = [ProbedGpu(f"cuda:{index}", free, 80 * GIB) for index in range(8)]
        super().__init__(config, lambda flag: gpus)
        self._name = name

    def names(self) -> list[str]:
        return [f"{self._name}-{device}" for device in self._devices]


def own_gpus(folder: Path, **flags: object) -> FakeGpus:
    return FakeGpus(PDConfig(device="cuda:1", tensor_parallel=2, **flags), folder.name)  # type: ignore[arg-type]


async def test_others_start_on_its_gpus_once_it_listens(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    program = Program(tmp_path, f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n{LISTENS}")
    port = free_port()
    gpus = own_gpus(tmp_path)
    server = OwnServer([str(program.path), "--port", str(port)], port, gpus)
    running = asyncio.create_task(server.run(asyncio.Event()))
    try:
        await until(lambda: len(program.pids) == 1)
        others = [StartLock(name) for name in gpus.names()]
        assert len(others) == 2
        assert not any(other.try_acquire() for other in others), "it starts"
        gate.touch()
        await until(lambda: server.served, "the server")
        assert all(other.try_acquire() for other in others), "it listens"
        for other in others:
            other.release()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_its_start_waits_for_that_of_another_worker_on_one_of_its_gpus(tmp_path: Path) -> None:
    program, gpus = Program(tmp_path, LISTENS), own_gpus(tmp_path)
    other = StartLock(gpus.names()[1])
    assert other.try_acquire()
    server = OwnServer([str(program.path), "--port", "1"], 1, gpus)
    running = asyncio.create_task(server.run(asyncio.Event()))
    try:
        first = StartLock(gpus.names()[0])
        # It holds its first lock: it has come to wait for the second.
        await until(lambda: not _free(first))
        assert not program.pids
        other.release()
        await until(lambda: len(program.pids) == 1)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert first.try_acquire(), "a worker that ends leaves no lock"
    first.release()


def _free(lock: StartLock) -> bool:
    try:
        return lock.try_acquire()
    finally:
        lock.release()


async def test_it_does_not_start_beside_a_process_that_holds_memory_of_the_gpu(tmp_path: Path) -> None:
    program, stop = Program(tmp_path, LISTENS), asyncio.Event()
    config = PDConfig(device="cuda:1")
    server = OwnServer([str(program.path)], 1, FakeGpus(config, tmp_path.name, free=60 * GIB))
    await server.run(stop)
    assert stop.is_set() and not program.pids
    assert "another process holds memory of cuda:1: 60.0 GiB of 80.0 GiB are free" in server.failed
    assert "give --device-memory" in server.failed
    given = FakeGpus(replace(config, device_memory=GIB), tmp_path.name, free=60 * GIB)
    await given.claim()
    assert given.names() == [], "workers with shares start together"


async def test_the_token_and_the_certificates_reach_it_by_file(checkpoint: Path, tmp_path: Path) -> None:
    token = "t" * 64
    program = Program(tmp_path, LISTENS)
    config = config_of(checkpoint, tls_cert_file="c", tls_key_file="k", tls_ca_file="a", tls_name="triptych")
    async with own_server.own_server(config, str(program.path), asyncio.Event(), token):
        await until(lambda: len(program.pids) == 1)
        words = [str(word) for word in program.starts[0]]
        assert token not in " ".join(words)
        transfer = json.loads(words[words.index("--ec-transfer-config") + 1])
        options = parse_options(transfer["ec_connector_extra_config"])
        assert options.token == token
        assert options.tls is not None
        assert (options.tls.cert, options.tls.key, options.tls.ca, options.tls.name) == (
            "c",
            "k",
            "a",
            "triptych",
        )
