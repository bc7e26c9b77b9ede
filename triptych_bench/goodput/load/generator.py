"""The load generator: a process of its own, so that nothing of the harness delays a send.

Reads a job (msgpack) from standard input, writes progress (JSON lines) to standard output and its report
(msgpack) to the file that its only argument names.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from triptych.base.errors import TriptychError
from triptych_bench.goodput.load.client import LoadClient, make_session
from triptych_bench.goodput.load.job import LoadJob, Progress, RequestRecord, WindowReport
from triptych_bench.goodput.load.payload import Bodies

#: The event loop's timers count milliseconds: the last one is waited for in turns of the loop.
_TURN = 0.0015
_PROGRESS_SECONDS = 0.5


class Generator:
    """Runs one job."""

    def __init__(self, job: LoadJob, bodies: Bodies) -> None:
        self._job = job
        self._bodies = bodies
        self.records: list[RequestRecord] = []
        self._sent = 0

    def progress(self) -> Progress:
        failed = sum(not record.ok for record in self.records)
        return Progress(self._sent, len(self.records), failed, len(self._job.schedule))

    async def run(self) -> WindowReport:
        """Until every request has ended; each has its own timeout."""
        async with make_session(self._job.target) as session:
            start, started, cpu = time.perf_counter(), time.time(), time.process_time()
            client = LoadClient(session, self._job.target, start, self._job.timeout)
            await (self._closed(client, start) if self._job.concurrency else self._open(client, start))
            wall = time.perf_counter() - start
            share = (time.process_time() - cpu) / max(wall, 1e-9)
        records = tuple(sorted(self.records, key=lambda record: record.index))
        return WindowReport(records, share, wall, started)

    async def _open(self, client: LoadClient, start: float) -> None:
        """Sends at the planned times, whatever the server does."""
        async with asyncio.TaskGroup() as group:
            for index, (planned, _) in enumerate(self._job.schedule):
                body = self._bodies.body(index)
                await _sleep_until(start + planned)
                group.create_task(self._send(client, index, planned, body))

    async def _closed(self, client: LoadClient, start: float) -> None:
        """Keeps `concurrency` requests in flight; what is sent is then never late."""
        indexes = iter(range(len(self._job.schedule)))

        async def user() -> None:
            for index in indexes:
                await self._send(client, index, time.perf_counter() - start, self._bodies.body(index))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._job.concurrency, len(self._job.schedule))):
                group.create_task(user())

    async def _send(self, client: LoadClient, index: int, planned: float, body: bytes) -> None:
        self._sent += 1
        request = self._job.schedule[index][1]
        warm_up = index < self._job.warm_up
        self.records.append(await client.send(index, planned, request, body, warm_up))


async def _sleep_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        await asyncio.sleep(left - _TURN if left > 2 * _TURN else 0)


async def generate(job: LoadJob, report_progress: Callable[[Progress], None]) -> WindowReport:
    """Draws the job's pictures, then runs it; `report_progress` is called twice a second."""
    bodies = Bodies(job)
    generator = Generator(job, bodies)

    async def keep_reporting() -> None:
        while True:
            report_progress(generator.progress())
            await asyncio.sleep(_PROGRESS_SECONDS)

    reporter = asyncio.create_task(keep_reporting())
    try:
        return await generator.run()
    finally:
        reporter.cancel()
        bodies.close()


def _write_progress(progress: Progress) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(progress) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=LoadJob)
    # A collection in the middle of a window would be a late send.
    gc.collect()
    gc.freeze()
    gc.disable()
    report = uvloop.run(generate(job, _write_progress))
    Path(sys.argv[1]).write_bytes(msgspec.msgpack.encode(report))


if __name__ == "__main__":
    main()


#: Seconds beyond the last planned send and its timeout: drawing pictures, starting, ending.
_SLACK = 600.0


class LoadError(TriptychError):
    """The load generator ended without a report."""


def run_window(job: LoadJob, on_progress: Callable[[Progress], None] = lambda progress: None) -> WindowReport:
    """Sends the job's load from a process of its own. LoadError when that ends without a report."""
    last = max((planned for planned, _ in job.schedule), default=0.0)
    waves = len(job.schedule) / job.concurrency if job.concurrency else 1.0
    deadline = last + job.timeout * max(waves, 1.0) + _SLACK
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        path = Path(folder) / "report"
        command = [sys.executable, "-m", "triptych_bench.goodput.load.generator", str(path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            timer = threading.Timer(deadline, process.kill)
            timer.start()
            try:
                errors = _converse(process, msgspec.msgpack.encode(job), on_progress)
            finally:
                timer.cancel()
                if process.poll() is None:
                    process.kill()
        if process.returncode or not path.exists():
            raise LoadError(f"the load generator ended with {process.returncode}: {errors.strip()[-2000:]}")
        return msgspec.msgpack.decode(path.read_bytes(), type=WindowReport)


def _converse(process: subprocess.Popen[bytes], job: bytes, on_progress: Callable[[Progress], None]) -> str:
    """Gives the job, hands on every line of progress, waits for the end; what it wrote as errors."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    result: list[bytes] = []
    reader = threading.Thread(target=lambda: result.append(process.stderr.read()))  # type: ignore[union-attr]
    reader.start()
    # A generator that could not start gives its reason by exit code and standard error.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(job)
        process.stdin.close()
    for line in process.stdout:
        on_progress(msgspec.json.decode(line, type=Progress))
    process.wait()
    reader.join()
    return b"".join(result).decode(errors="replace")
