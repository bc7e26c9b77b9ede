"""What the registry costs: CPU of the store and of a proxy per heartbeat, and per look at it.

Workers register every two seconds; every proxy looks twice a second and reads all of them where one has come,
gone or changed. The store's CPU time is its own account of it (`INFO cpu`), the client's is this
process's. `triptych plan --scale` uses the fits.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.result_page import RESULTS, fill, page_parser, publish
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base.types import WorkerInfo
from triptych.registry.registry import Registry
from triptych.store.embedding_store import EmbeddingStore
from triptych_bench.goodput.report.machine import describe, load_average

RESULT = RESULTS / "registry_load.md"
WORKERS = (10, 100, 1000)
BEATS, LOOKS = 2000, 200


def worker(index: int) -> WorkerInfo:
    """As an encoder of Qwen3-VL registers itself."""
    return WorkerInfo(
        address=f"10.0.{index // 250}.{index % 250}:50051",
        pool="encoder" if index % 4 == 0 else "pd",
        incarnation=f"{index:032x}",
        model_key="a" * 64,
        model="Qwen3-VL-4B-Instruct",
        namespaces=("b" * 64,),
        capacity={"plan_credit": 16, "tower_credit": 8},
    )


async def cpu_of(
    store: EmbeddingStore, work: Callable[[int], Awaitable[object]], count: int
) -> tuple[float, float]:
    """(store's, client's) CPU seconds of one call."""
    server, client = await server_cpu(store), time.process_time()
    for index in range(count):
        await work(index)
    client = time.process_time() - client
    return (await server_cpu(store) - server) / count, client / count


async def beat(registry: Registry, held: Sequence[WorkerInfo], index: int) -> None:
    await registry.register(held[index % len(held)], 3600.0)


async def look_again(registry: Registry, mark: str, _: int) -> None:
    result = await registry.poll("proxy", 3600.0, mark=mark)
    assert result.workers is None, "nothing has changed"


async def server_cpu(store: EmbeddingStore) -> float:
    """User and system seconds since the store's start."""
    info: dict[str, float] = await store.control.execute("INFO", "cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


Costs = dict[str, tuple[float, float]]


async def measure(url: str, repeats: int) -> Costs:
    """Medians by name: a beat, and looks at each number of workers, changed and unchanged ones."""
    store = await EmbeddingStore.connect(url)
    taken: dict[str, list[tuple[float, float]]] = {}
    try:
        registry = Registry(store)
        for _ in range(repeats):
            await store.control.execute("FLUSHALL")
            held: list[WorkerInfo] = []
            for count in WORKERS:
                for index in range(len(held), count):
                    held.append(worker(index))
                    await registry.register(held[index], 3600.0)
                result = await cpu_of(store, lambda _: registry.poll("proxy", 3600.0), LOOKS)
                taken.setdefault(f"look {count}", []).append(result)
                again = partial(look_again, registry, (await registry.poll("proxy", 3600.0)).mark)
                taken.setdefault(f"again {count}", []).append(await cpu_of(store, again, LOOKS))
            result = await cpu_of(store, partial(beat, registry, held), BEATS)
            taken.setdefault("beat", []).append(result)
    finally:
        await store.close()
    return {
        name: (statistics.median(one[0] for one in every), statistics.median(one[1] for one in every))
        for name, every in taken.items()
    }


def line(costs: Costs, side: int) -> tuple[float, float]:
    """(seconds of a look, further seconds per worker): through the least and the most workers."""
    minimum, maximum = costs[f"look {WORKERS[0]}"][side], costs[f"look {WORKERS[-1]}"][side]
    slope = (maximum - minimum) / (WORKERS[-1] - WORKERS[0])
    return minimum - slope * WORKERS[0], slope


def report(costs: Costs, repeats: int, load_before: float) -> str:
    machine, rows = describe(load_before), costs.items()
    fits = [f"{a * 1e6:.0f} µs + {b * 1e6:.2f} µs" for a, b in (line(costs, 0), line(costs, 1))]
    return fill(
        "registry_load",
        repeats=repeats,
        machine=machine,
        fits=fits,
        loaded=" MADE ON A LOADED MACHINE." if machine.loaded else "",
        rows="\n".join(f"| {_title(n)} | {a * 1e6:.1f} | {b * 1e6:.1f} |" for n, (a, b) in rows),
    )


def _title(name: str) -> str:
    name = name.replace("look", "look at changed workers:")
    return name.replace("again", "look at workers that are as they were:")


def main() -> None:
    options = page_parser(__doc__, RESULT, repeats=5).parse_args()
    load_before = load_average()
    with tempfile.TemporaryDirectory() as folder, EmbeddedStore(Path(folder), 1 << 28) as server:
        costs = asyncio.run(measure(server.url, options.repeats))
    publish(report(costs, options.repeats, load_before), RESULT, write=options.write)
