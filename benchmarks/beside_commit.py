"""A goodput mix, CPU of relay, of an engine's steps and of small pictures, beside another commit: one tenant.

    git worktree add --detach ../before COMMIT         # and a .venv there
    python -m benchmarks beside_commit ../before [--rounds 5]

Both checkouts' processes stay up, and take turns: the figure is the median of the rounds' ratios, the other
commit's CPU seconds over this one's. Relay and text requests are those of `hot_paths`; the steps are of the
demo's decoder on one thread, with scheduler, events and metrics: for 1, 16 and 64 requests that decode, and
for requests of 8 tokens that come and go. Pictures count by the clock: a PNG of 224x224 decoded and
preprocessed in two threads, by an encoder worker's scheduler, with eight there at once. The mix is served by
each checkout's cluster in turns, both with this commit's demo model: of two clusters at once one alone would
keep a core to itself.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Requests that decode at once, and the steps of one round.
DECODING = {1: 400, 16: 150, 64: 60}
#: Requests that come and go, and how many are there at once.
SHORT, AT_ONCE = 120, 16
#: Pictures of one round, and how many are there at once.
PICTURES, PICTURES_AT_ONCE = 600, 8
#: What both clusters get, four of five requests of text alone.
MIX = "bench goodput --launch 1E1PD --workload mix --concurrency 16 --requests 200 --warm-up 3 --plots none"
CASES = (
    "goodput mix",
    "small pictures",
    "relay",
    "text, streamed",
    "text, whole",
    *(f"step of {n}" for n in DECODING),
    "short requests",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path, help="another commit's, with a .venv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    options = parser.parse_args()
    checkouts = [options.checkout.resolve(), ROOT]
    if "goodput mix" in options.cases:
        _compare("goodput mix", options.rounds, [partial(_mix, checkout) for checkout in checkouts])
    cases = [case for case in options.cases if case != "goodput mix"]
    sides = [_start(checkout) for checkout in checkouts] if cases else []
    try:
        for case in cases:
            _compare(case, options.rounds, [partial(_ask, side, case) for side in sides])
    finally:
        for side in sides:
            assert side.stdin is not None
            side.stdin.close()  # it ends with its children
            side.wait()


def _compare(case: str, rounds: int, sides: Sequence[Callable[[], float]]) -> None:
    """Writes the case's line: the other commit's side and this one's in turns, after a warm-up."""
    taken = []
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        taken.append({place: sides[place]() for place in order})
    before, now = (statistics.median(each[place] for each in taken[1:]) for place in (0, 1))
    ratio = statistics.median(each[0] / each[1] for each in taken[1:])
    sys.stdout.write(f"{case:16} {before:9.1f} us before, {now:9.1f} us now: {ratio:.3f}\n")
    sys.stdout.flush()


def _mix(checkout: Path) -> float:
    """Microseconds of the clock for one request of a window, whose pictures nobody has sent before."""
    with tempfile.TemporaryDirectory(prefix="triptych-mix-") as folder:
        output = Path(folder) / "mix"
        model = ("--launch-model", str(ROOT / "triptych/demo/model"), "--output", str(output))
        subprocess.run(
            [checkout / ".venv/bin/triptych", *MIX.split(), *model],
            cwd=checkout,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=300,
        )
        [window] = json.loads(output.with_suffix(".json").read_text())["windows"]
    assert not window["failed"], f"{window['failed']} requests failed"
    return 1e6 / float(window["request_throughput"])


def _start(checkout: Path) -> subprocess.Popen[str]:
    # Its own packages and benchmarks; this file's folder is not searched (-P).
    command = [str(checkout / ".venv/bin/python"), "-P", __file__]
    side = subprocess.Popen(
        command,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert side.stdout is not None
    while (line := side.stdout.readline()) != "ready\n":
        if not line:
            raise SystemExit(f"{checkout}: the side ended with {side.wait()}")
    return side


def _ask(side: subprocess.Popen[str], case: str) -> float:
    """Microseconds of CPU for one token, request or step."""
    assert side.stdin is not None and side.stdout is not None
    side.stdin.write(case + "\n")
    side.stdin.flush()
    return float(side.stdout.readline())


def side() -> None:
    """One checkout's processes: answers the names of cases with figures."""
    program, processes = _relay_modules()
    relay, served = program.relay, program.served
    decode, come_and_go = _engine()
    pictures = _pictures()
    with processes.children() as start:
        _, pd_port = start(processes.pd_process, 8)
        proxy, port = start(processes.proxy_process, pd_port)
        _, counting_port = start(processes.counting_process)
        text_proxy, text_port = start(processes.proxy_process, counting_port)
        time.sleep(1.0)
        cases: dict[str, Callable[[], float]] = {
            "relay": lambda: 1 / asyncio.run(relay(port, proxy, 8, 2000))[0],
            "text, streamed": lambda: 1 / asyncio.run(served(text_port, text_proxy, stream=True)),
            "text, whole": lambda: 1 / asyncio.run(served(text_port, text_proxy, stream=False)),
            "short requests": come_and_go,
            "small pictures": lambda: asyncio.run(pictures()),
            **{f"step of {count}": lambda count=count: decode(count) for count in DECODING},  # type: ignore[misc]
        }
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for line in sys.stdin:
            sys.stdout.write(f"{1e6 * cases[line.strip()]()}\n")
            sys.stdout.flush()


def _relay_modules() -> tuple[Any, Any]:
    """The relay's clients and its processes, by the names that they have had."""
    package, folder = "benchmarks.proxy_relay", "benchmarks.micro"
    for names in (
        (f"{folder}.hot_paths", f"{folder}.proxy_processes"),
        (f"{folder}.proxy_relay", f"{folder}.proxy_processes"),
        (f"{package}.__main__", f"{package}.processes"),
    ):
        try:
            return import_module(names[0]), import_module(names[1])
        except ModuleNotFoundError:
            continue
    raise SystemExit("this checkout has no benchmark of the relay")


def _engine() -> tuple[Callable[[int], float], Callable[[], float]]:
    """CPU seconds of a step by its number of decoding requests, and of a request of 8 tokens among others."""
    import torch

    from benchmarks.gpu.engine_rounds import make_engine, make_requests
    from triptych.models.registry import load_decoder
    from triptych.pd_worker.attention.attention import ATTENTION_NAME

    torch.set_num_threads(1)
    path = Path("triptych/demo/model")
    decoder = load_decoder(
        path, device=torch.device("cpu"), dtype=torch.float32, attn_implementation=ATTENTION_NAME
    )
    engine = make_engine(path, decoder, kv_memory=64 << 20, max_num_seqs=64, encoder_cache_memory=1 << 20)
    scheduler, rows = engine.scheduler, engine.runner.position_rows

    def decode(count: int) -> float:
        steps = DECODING[count]
        for request in make_requests(engine, [[7 + at % 50] * 24 for at in range(count)], steps + 8, rows):
            scheduler.add(request, time.monotonic())
        for _ in range(4):
            engine._step(())
        began = time.process_time()
        for _ in range(steps):
            engine._step(())
        seconds = time.process_time() - began
        while scheduler.num_running:
            engine._step(())
        return seconds / steps

    def come_and_go() -> float:
        left = make_requests(engine, [[7 + at % 50] * 24 for at in range(SHORT)], 8, rows)
        began = time.process_time()
        while left or scheduler.num_running or scheduler.num_waiting:
            while left and scheduler.num_running + scheduler.num_waiting < AT_ONCE:
                scheduler.add(left.pop(), time.monotonic())
            engine._step(())
        return (time.process_time() - began) / SHORT

    return decode, come_and_go


def _pictures() -> Callable[[], Coroutine[None, None, float]]:
    """Seconds of the clock that a small picture takes, with others beside and behind it."""
    import numpy as np
    import torch
    from PIL import Image

    from triptych.encoder_worker.media.preparer import Preparer, VerifiedMedia
    from triptych.encoder_worker.scheduler import EncoderItem, EncoderScheduler
    from triptych.models.registry import load_encoder

    side = load_encoder(Path("triptych/demo/model"), device=torch.device("cpu"), dtype=torch.float32)
    file, noise = io.BytesIO(), np.random.default_rng(1).integers(0, 256, (15, 15, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((224, 224), Image.Resampling.BICUBIC).save(file, "PNG")
    media = VerifiedMedia(file.getvalue(), {}, "image")
    scheduler_of = partial(EncoderScheduler, prepared_memory=1 << 40, batch_patches=1, tower_credit=1)

    async def measure() -> float:
        preparer = Preparer(side, max_pixels=1 << 24, threads=2)
        scheduler: Any = scheduler_of(preparations=2)
        running = set[asyncio.Task[None]]()
        charged = hasattr(preparer, "work")  # older commits know no tenants there
        left = PICTURES

        def add() -> None:
            nonlocal left
            left -= 1
            item = EncoderItem(looked_up=True)
            scheduler.add(item)
            scheduler.media_arrived(item)

        async def prepare(item: EncoderItem) -> None:
            await preparer.prepare(media, *((preparer.work(heavy=False),) if charged else ()))
            if charged:
                scheduler.decoded(item, time.monotonic())
            scheduler.prepared(item, nbytes=1, cost=1)
            scheduler.remove(item)
            if left:
                add()

        began = time.perf_counter()
        for _ in range(PICTURES_AT_ONCE):
            add()
        while len(scheduler):
            while (item := scheduler.next_preparation(*((time.monotonic(),) if charged else ()))) is not None:
                task = asyncio.create_task(prepare(item))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        seconds = time.perf_counter() - began
        preparer.close()
        return seconds / PICTURES

    return measure


if __name__ == "__main__":
    side()
