"""Embeddings from the tower's output to rows in vLLM, by its connector's loader: time by path, as ratios."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from benchmarks.micro.hot_paths import Workers, plan_of
from benchmarks.micro.links import Hosts, enter, hosts
from benchmarks.result_page import RESULTS, fill, page_parser, publish, ranged, table
from triptych.apps.launch.embedded_store import EmbeddedStore, find_server_binary
from triptych.base.source_tickets import SourceTickets
from triptych.base.types import EmbeddingSource
from triptych.integrations.vllm.copy_loader import CopyLoader
from triptych.integrations.vllm.host_copies import CopyFolder, HostCopies
from triptych.integrations.vllm.mapped_copies import MappedCopies
from triptych.integrations.vllm.options import ConnectorOptions
from triptych.integrations.vllm.rows import read_rows, source_of

RESULT = RESULTS / "vllm_paths.md"
#: Rows and their width in bf16.
SIZES = {"66.8 MB": (2040, 16384), "1 MB": (64, 8192)}
PATHS = ("store", "peer", "shm")
_TOKEN = "t" * 32
#: As the engine's steps, which take up reports.
_STEP_SECONDS = 0.001
_PORT = 6379
_START_SECONDS = 10.0


def read_as_vllm(url: str, pipe: Connection, *, ranks: bool, namespace: str = "") -> None:
    """The engine's process: loads what comes, answers (moment, path, CPU seconds so far)."""
    if namespace:
        enter(namespace)
    options = ConnectorOptions(url, ("benchmark",), token=_TOKEN)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        loaders = {
            width: CopyLoader(options, HostCopies(1 << 30, CopyFolder(folder) if ranks else None), width)
            for _, width in SIZES.values()
        }
        number, mapped = 0, MappedCopies()
        while (order := msgspec.msgpack.decode(pipe.recv_bytes())) is not None:
            number += 1
            plan, loader = plan_of(*order[0]), loaders[order[0][2]]
            if order[1]:
                call = f"{number:032}"
                entry = SourceTickets(_TOKEN).entry(plan, EmbeddingSource(*order[1]), call)
                loader.note(call, {plan.mm_hash: entry})
            loader.start(plan.mm_hash)
            while not (reports := loader.reports()):
                time.sleep(_STEP_SECONDS)
            copy = reports[0].copy
            if copy is None:
                raise RuntimeError(reports[0].reason)
            rows = read_rows(source_of(copy), torch.device("cpu"), torch.bfloat16, mapped=mapped)
            moment = time.monotonic()
            path = ("shm" if order[1][1] else "peer") if order[1] else "store"
            pipe.send_bytes(msgspec.msgpack.encode((moment, path, time.process_time())))
            loader.drop(copy)
            del rows, copy, reports
        for loader in loaders.values():
            loader.close()


#: By round, size and path: medians of milliseconds.
Rounds = list[dict[tuple[str, str], float]]


def measure(workers: Workers, repeats: int, rounds: int, paths: tuple[str, ...]) -> Rounds:
    """The rounds after a first one, in which connections are made and memory is touched."""
    measured: Rounds = []
    for turn in range(rounds + 1):
        times: dict[tuple[str, str], list[float]] = {(s, p): [] for s in SIZES for p in paths}
        for count in range(repeats if turn else 3):
            for (size, path), taken in times.items():
                taken.append(workers.transfer(f"{turn} {count} {size} {path}", SIZES[size], path)[0])
        if turn:
            measured.append({key: statistics.median(taken) for key, taken in times.items()})
    workers.close()
    return measured


def on_one_host(repeats: int, rounds: int, *, ranks: bool) -> Rounds:
    with tempfile.TemporaryDirectory() as folder, EmbeddedStore(Path(folder), 1 << 30) as server:
        workers = Workers(server.url, partial(read_as_vllm, ranks=ranks))
        return measure(workers, repeats, rounds, PATHS)


def between_hosts(repeats: int, rounds: int, at: Hosts) -> Rounds:
    """The process stays in the encoder worker's namespace."""
    with store_at(at) as url:
        enter(at.encoder)
        read = partial(read_as_vllm, ranks=False, namespace=at.vllm)
        return measure(Workers(url, read, host=at.encoder_address), repeats, rounds, ("store", "peer"))


@contextmanager
def store_at(at: Hosts) -> Iterator[str]:
    """A store in its namespace; its URL."""
    words = ["--bind", at.store_address, "--port", str(_PORT), "--protected-mode", "no", "--save", ""]
    words += ["--maxmemory", "1gb", "--maxmemory-policy", "volatile-lru"]
    command = ["ip", "netns", "exec", at.store, str(find_server_binary()), *words]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            deadline = time.monotonic() + _START_SECONDS
            while "Ready to accept" not in (line := server.stdout.readline()):
                if not line or time.monotonic() > deadline:
                    raise RuntimeError("the store has not started")
            yield f"redis://{at.store_address}:{_PORT}/0"
        finally:
            server.terminate()
            server.wait(_START_SECONDS)


def rows(arrangement: str, measured: Rounds, bounds: dict[tuple[str, str], str]) -> Iterator[tuple[str, ...]]:
    """Of a table: arrangement, size, path, milliseconds, ratio to the same round's store, its bound."""
    for size, path in measured[0]:
        times = [each[size, path] for each in measured]
        shares = [each[size, path] / each[size, "store"] for each in measured]
        middle = [ranged(statistics.median(v), min(v), max(v)) for v in (times, shares)]
        yield arrangement, size, path, *middle, bounds.get((size, path), "")


def main() -> None:
    parser = page_parser(__doc__, RESULT, repeats=10, rounds=3)
    parser.add_argument("--rate", default="", help="links between namespaces, e.g. 10gbit; needs root")
    options = parser.parse_args()
    bounds = {("66.8 MB", "shm"): "≤ 0.35", ("1 MB", "shm"): "≤ 1", ("1 MB", "peer"): "≤ 1"}
    cells: list[tuple[str, ...]] = []
    for name, ranks in (("one rank", False), ("ranks", True)):
        cells += rows(name, on_one_host(options.repeats, options.rounds, ranks=ranks), bounds)
    with ExitStack() as stack:
        if options.rate:
            measured = between_hosts(
                options.repeats, options.rounds, stack.enter_context(hosts(options.rate))
            )
            far = {("66.8 MB", "peer"): "≤ 0.65", ("1 MB", "peer"): "≤ 1"}
            cells += rows(f"hosts, {options.rate}", measured, far)
    rate = f" --rate {options.rate}" if options.rate else ""
    network = (
        f" *hosts*: encoder worker, vLLM and store are in network namespaces whose links carry {options.rate}"
        " each way."
        if options.rate
        else ""
    )
    command = (
        f"python -m benchmarks micro vllm_paths --repeats {options.repeats} --rounds {options.rounds}{rate}"
    )
    head = ("arrangement", "embedding", "path", "ms, median (range of rounds)", "of the store's", "bound")
    page = fill(
        "vllm_paths",
        command=command,
        repeats=options.repeats,
        network=network,
        paths="\n".join(table(head, cells, (0, 1, 2))),
    )
    publish(page, RESULT, write=options.write)


if __name__ == "__main__":
    main()
