"""vLLM as a process: an unmodified `vllm serve` of an environment of its own, which loads our connector."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from support.netns.network import Network
from support.processes.cluster import free_port, scrape, wait_for
from triptych.base.parent import supervised
from triptych.pd_worker.vllm.kv_transfer import transfer_config

ROOT = Path(__file__).parents[3]
#: Where `make test-vllm` installs vLLM.
HOME = Path(os.environ.get("TRIPTYCH_VLLM_HOME", ROOT / ".tools" / "vllm"))
#: Seconds until a server answers; most of them are imports in three processes.
_START = 400.0
_REPLY = 300.0
#: The most items of each modality in a request.
LIMITS = MappingProxyType({"image": 8, "video": 0})


class VllmServer:
    """One `vllm serve` of a checkpoint, named "model", with TriptychECConnector in the given role.

    `limits` are the most items of each modality in a request. `nixl`: its role, where its KV moves to other
    servers, by this `connector`. `at`: a host of a network, with the network.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        role: str,
        extra: Mapping[str, object],
        words: Sequence[str] = (),
        limits: Mapping[str, int] = LIMITS,
        *,
        nixl: str = "",
        connector: str = "NixlConnector",
        at: tuple[Network, str] | None = None,
    ) -> None:
        self.host = at[0].addresses[at[1]] if at else "127.0.0.1"
        self.port = free_port()
        self.log = log
        self.extra = {"trusted_front_door": role != "ec_consumer", **extra}
        transfer = {
            "ec_connector": "TriptychECConnector",
            "ec_connector_module_path": "triptych.integrations.vllm",
            "ec_role": role,
            "ec_connector_extra_config": self.extra,
        }
        self._command = [
            *(str(HOME / "venv" / "bin" / "vllm"), "serve", str(model), "--served-model-name", "model"),
            *("--host", self.host, "--port", str(self.port), "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "2048", "--max-num-seqs", "16", "--enable-mm-embeds"),
            *("--limit-mm-per-prompt", json.dumps(dict(limits))),
            *("--ec-transfer-config", json.dumps(transfer), *words),
        ]
        self._variables: dict[str, str] = {}
        if nixl:
            moves = {**transfer_config(nixl), "kv_connector": connector, "kv_buffer_device": "cpu"}
            self._command += ["--kv-transfer-config", json.dumps(moves)]
            self._variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        if at:
            self._command = at[0].command(at[1], *self._command)
            # Memory that processes of one machine share would go past the network.
            self._variables |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": self.host, "UCX_TLS": "tcp"}
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of_words(cls, words: Sequence[str], log: Path) -> VllmServer:
        """One of the words behind `vllm serve` as they are, and a name, a port and limits for a test."""
        server = cls(Path(words[0]), log, "ec_consumer", {})
        small = ("--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager")
        limits = ("--limit-mm-per-prompt", '{"image": 8, "video": 0}')
        own = ("--served-model-name", "model", "--host", "127.0.0.1", "--port", str(server.port))
        server._command = [str(HOME / "venv" / "bin" / "vllm"), "serve", *words, *own, *small, *limits]
        return server

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Starts the process and waits until it answers."""
        self.launch()
        self.wait()

    def launch(self) -> None:
        """Starts the process, which is ready after `wait`: several of them start side by side.

        It ends with the thread that has started it, so that has to be one that lives as long.
        """
        assert threading.current_thread() is threading.main_thread(), "the process would end with this thread"
        command, environment = supervised(self._command)
        environment |= vllm_environment() | self._variables
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )

    def wait(self) -> None:
        """Returns once the process answers."""
        wait_for("vLLM to answer", self._answers, _START)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(
                f"vLLM ended with {self._process.returncode}:\n{self.log.read_text()[-4000:]}"
            )
        return self.is_alive()

    def is_alive(self) -> bool:
        """Whether the engine says that it is healthy; after the death of its core it never does again."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return int(reply.status) == 200
        except OSError:
            return False

    def ask(self, content: Sequence[Mapping[str, Any]], tokens: int, **options: Any) -> dict[str, Any]:
        """The reply to one user message: its `status`, and `token_ids` where it is 200."""
        body = {
            "model": "model",
            "messages": [{"role": "user", "content": list(content)}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **options,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_REPLY) as reply:
                answer: dict[str, Any] = json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                return {"status": error.code, "error": error.read().decode()}
        return {**answer, "status": 200, "token_ids": answer["choices"][0]["token_ids"]}

    def metrics(self) -> dict[str, float]:
        """Samples of its /metrics page."""
        return scrape(f"{self.url}/metrics")

    def _pids(self) -> list[int]:
        assert self._process is not None
        return [self._process.pid, *descendants(self._process.pid)]

    def cpu_seconds(self) -> float:
        """Of all its processes and their threads."""
        stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self._pids())
        return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """SIGKILL to the server and to its engine, as if their container ended."""
        assert self._process is not None
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what has not ended after a minute."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def descendants(pid: int) -> list[int]:
    """Process ids below a process."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for file in files for child in file.read_text().split()]
    return [each for child in children for each in (child, *descendants(child))]


def vllm_environment() -> dict[str, str]:
    """The variables of a process in vLLM's environment, with this project on its path."""
    openmp = HOME / "venv" / "lib" / "libiomp5.so"
    return {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HOME / 'packages'}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "LD_PRELOAD": str(openmp) if openmp.exists() else "",
    }
