"""Time to first token and CPU time of requests with one new picture, by transfer path, in whole clusters."""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import triptych.demo
from benchmarks.baselines.servers import usages
from benchmarks.micro.encoder_host import photo
from benchmarks.micro.encoder_worker_path import SIZE
from benchmarks.result_page import RESULTS, add_write_flag, fill, publish
from triptych.base.config import WorkerCounts
from triptych.goodput.launch import Launched, launched

RESULT = RESULTS / "path_ttft.md"
PATHS = ("shm", "peer", "store")
#: Hidden size of the model, and the picture. Rows are four times as wide, for three DeepStack levels.
_CASES = {
    "1080p, 66.8 MB": (4096, 1920, 1080),
    "448 px, 6.4 MB": (4096, 448, 448),
    "448 px, 0.4 MB": (256, 448, 448),
}
_FLAGS = (
    *("--threads", "1", "--encoder-threads", "1", "--dtype", "bfloat16"),
    *("--encoder-cache-memory", "512MiB", "--kv-memory", "256MiB"),
    *("--cpu-sharing", "free"),  # else each cluster's PD worker keeps to another core
)
#: Seconds after a round in which saves beside the answers end: their CPU time counts.
_SAVES = 0.4
_PATIENCE = 60.0
#: What the waterfall of a request says of the load.
_NOTES = {"shm": "by shared memory", "peer": "from the encoder worker", "store": ""}
#: Refuses connections to the sockets that pass shared memory: as between two hosts.
_OTHER_HOST = """
import socket
connect = socket.socket.connect
def refusing(self, address, /):
    if str(address).startswith("\\0triptych-ec-"):
        raise ConnectionRefusedError("of another host")
    return connect(self, address)
socket.socket.connect = refusing
"""


def write_model(folder: Path, hidden: int) -> None:
    """A random Qwen3-VL whose rows are as wide as a real one's, and whose tower and layers cost little."""
    torch.manual_seed(0)
    demo = Path(triptych.demo.__file__).parent / "model"
    shutil.copytree(demo, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((demo / "config.json").read_text())
    config["text_config"] |= {
        "hidden_size": hidden,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
    }
    config["vision_config"] |= {
        "deepstack_visual_indexes": [0, 1, 2],
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
        "out_hidden_size": hidden,
    }
    Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config)).to(torch.bfloat16).save_pretrained(folder)
    processor = json.loads((demo / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"size": SIZE}))


@dataclass
class Samples:
    """One path's milliseconds to the first token, those without tower and prefill, and of CPU time."""

    ttft: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class Cluster:
    """A running cluster whose embeddings take one path, and one kept connection to its proxy."""

    def __init__(self, running: Launched, path: str) -> None:
        self._running, self._path = running, path
        self._http = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=_PATIENCE)
        self._model = str(self._get("/v1/models")["data"][0]["id"])

    def cpu(self) -> float:
        """CPU milliseconds of all its processes so far."""
        return sum(usage.cpu for usage in usages([self._running.pid]).values()) * 1e3

    def ask(self, file: bytes) -> tuple[float, float]:
        """Milliseconds to the first token, and those of them beside tower and prefill.

        RuntimeError when there is none, or the embedding came by another path.
        """
        url = f"data:image/jpeg;base64,{base64.b64encode(file).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
        body = {"model": self._model, "messages": [{"role": "user", "content": content}], "stream": True}
        raw = json.dumps(body | {"max_tokens": 1, "temperature": 0})
        self._http.close()  # the proxy has ended it while the other clusters were asked
        self._http.connect()
        began = time.perf_counter()
        self._http.request("POST", "/v1/chat/completions", raw, {"Content-Type": "application/json"})
        reply, first, name = self._http.getresponse(), 0.0, ""
        for line in reply:
            chunk = json.loads(line[5:]) if line.startswith(b"data: {") else {}
            choices = chunk.get("choices", ())
            if not first and any(each["delta"].get("content") or each["finish_reason"] for each in choices):
                first, name = (time.perf_counter() - began) * 1e3, chunk["id"].removeprefix("chatcmpl-")
        if not first:
            raise RuntimeError(f"no token: {reply.status}")
        spans = self._get(f"/cluster/requests/{name}")["spans"]
        note = next((span["note"] for span in spans if span["name"] == "load"), "no load")
        if note != _NOTES[self._path]:
            raise RuntimeError(f"the embedding came {note!r}, not by {self._path}")
        computed = sum(span["end"] - span["start"] for span in spans if span["name"] in ("encode", "prefill"))
        return first, first - computed * 1e3

    def _get(self, path: str) -> Any:
        self._http.request("GET", path)
        return json.loads(self._http.getresponse().read())


@contextmanager
def cluster(model: Path, path: str, scratch: Path) -> Iterator[Cluster]:
    """A cluster whose embeddings take `path`."""
    before = os.environ.get("PYTHONPATH", "")
    if path == "peer":
        (scratch / "sitecustomize.py").write_text(_OTHER_HOST)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(scratch), before)))
    flags = [*_FLAGS, "--ec-transfer", "store" if path == "store" else "auto"]
    with ExitStack() as stack:
        try:
            shape = WorkerCounts(encoders=1, pd_workers=1)
            running = stack.enter_context(launched(shape, str(model), flags))
        finally:
            os.environ["PYTHONPATH"] = before
        yield Cluster(running, path)


def measure(case: str, rounds: int, requests: int) -> dict[str, Samples]:
    """The requests of every path, one at a time, in rounds by turns; the first round is left out."""
    hidden, width, height = _CASES[case]
    file, numbers = photo(width, height, "JPEG"), count()
    samples = {path: Samples() for path in PATHS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(folder) / "model"
        write_model(model, hidden)
        clusters = {path: stack.enter_context(cluster(model, path, Path(folder))) for path in PATHS}
        for turn in range(rounds + 1):
            for path in PATHS[:: (-1) ** turn]:
                before = clusters[path].cpu()
                asked = [clusters[path].ask(file + next(numbers).to_bytes(8)) for _ in range(requests)]
                time.sleep(_SAVES)
                if turn:
                    samples[path].ttft += [ttft for ttft, _ in asked]
                    samples[path].rest += [rest for _, rest in asked]
                    samples[path].cpu.append((clusters[path].cpu() - before) / requests)
    return samples


def rows(case: str, samples: Mapping[str, Samples]) -> list[str]:
    """Lines of the table; the ratios are the store's figures divided by the path's, medians over pairs."""
    lines, store = [], samples["store"]
    for path, each in samples.items():
        pairs = ((store.ttft, each.ttft), (store.rest, each.rest), (store.cpu, each.cpu))
        ratios = [f"{statistics.median(s / p for s, p in zip(*pair, strict=True)):.2f}" for pair in pairs]
        times = [f"{statistics.median(times):.0f} ({min(times):.0f})" for times in (each.ttft, each.rest)]
        cells = [case, path, *times, f"{statistics.median(each.cpu):.0f}", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=3, help="of one path in a row")
    parser.add_argument("--case", choices=list(_CASES), action="append", help="default: all")
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    lines = []
    for case in options.case or _CASES:
        lines += rows(case, measure(case, options.rounds, options.requests))
    command = f"python -m benchmarks path_ttft --rounds {options.rounds} --requests {options.requests}"
    publish(fill("path_ttft", command=command, paths="\n".join(lines)), RESULT, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
