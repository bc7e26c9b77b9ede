"""What a killed or cut-off part costs: requests failed and wrong, seconds of stall, restarts by hand.

    python -m benchmarks kills PEER --results DIR [--rounds 1] [--minutes 25] [--systems native,vllm-epd]
                               [--faults '* killed']
    python -m benchmarks kills --results DIR [--add] --write

PEER is the kit of `against_peer`; three rounds of all by default, what is worth most first. Every run appends
to DIR what is not in it yet, so that one which was ended is continued; without PEER the page is made of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.against_peer.rounds import keep, kept
from benchmarks.kills.load import REQUESTS, Load, Trial, bodies
from benchmarks.kills.processes import Processes
from benchmarks.kills.rows import HEAD, Row, added, reasons_of, rows_of
from benchmarks.kills.systems import EMBEDDINGS, SYSTEMS, Place, System
from benchmarks.result_page import RESULTS, fill, publish, table
from triptych.base.errors import ConfigError
from triptych_bench.goodput.report.machine import commit

PAGE = RESULTS / "kills.md"
#: The trials that say which tokens are right.
RIGHT, NOTHING = "right", "nothing"
KILLED, CUT, LOST = "killed", "cut off", "lost"
#: Seconds without a sign of a part that is cut off; until a system must answer; and after a fault.
CUT_SECONDS, START_SECONDS, RETURN_SECONDS = 6.0, 400.0, 180.0
#: Seconds to answer in after the fault where nobody starts again what has ended.
ALONE_SECONDS = 20.0
_PROBE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which part."""

    part: str
    what: str

    @property
    def name(self) -> str:
        return f"{self.part} {self.what}".strip()

    async def act(self, system: System, processes: Processes) -> None:
        if self.what == LOST and system.files is not None:
            for entry in system.files.iterdir():
                shutil.rmtree(entry, ignore_errors=True)
        elif self.what == KILLED:
            processes.signal(system.parts[self.part], signal.SIGKILL)
        elif self.what == CUT:
            processes.signal(system.parts[self.part], signal.SIGSTOP)
            await asyncio.sleep(CUT_SECONDS)
            processes.signal(system.parts[self.part], signal.SIGCONT)


def faults(system: System) -> Iterator[Fault]:
    """Those that a system can have; only what is killed is different without a loop that starts again."""
    if system.restarts:
        yield Fault(NOTHING, "")
    for part in system.parts:
        yield Fault(part, KILLED)
        if system.restarts:
            yield Fault(part, CUT)
    if system.files is not None and system.restarts:
        yield Fault(EMBEDDINGS, LOST)


class Run:
    """The trials of one system in one round; none begins after `until`."""

    def __init__(
        self, name: str, number: int, place: Place, file: Path, asked: str, until: float = math.inf
    ) -> None:
        self._name, self._number, self._file, self._asked = name, number, file, asked
        self._place, self._until = place, until
        self._there = {(t.system, t.fault, t.number) for t in kept([file], Trial)}
        self._probes = 0

    async def measure(self) -> None:
        """What is not there yet; a system that does not come back is started again by hand."""
        left = [fault for fault in faults(self._system()) if self._is_left(self._name, fault)]
        right = [fault for fault in _all_faults() if self._is_left(RIGHT, fault)]
        # With nothing broken and nothing cached, and the answers that all systems' are compared with.
        right = right if self._name == "native" else []
        while (left or right) and self._has_time():
            async with self._serving() as (system, processes):
                while right and self._has_time():
                    await self._right(system, right.pop(0))
                while left and self._has_time():
                    trial = await self._trial(system, processes, left.pop(0))
                    keep(self._file, trial)
                    _say(trial)
                    if trial.by_hand:
                        break

    def _has_time(self) -> bool:
        return time.monotonic() < self._until

    def _is_left(self, name: str, fault: Fault) -> bool:
        known = (name, fault.name, self._number) in self._there
        return not known and fnmatch(fault.name, self._asked)

    def _system(self) -> System:
        folder = self._place.folder / f"{self._name}-{time.monotonic_ns()}"
        folder.mkdir()
        return SYSTEMS[self._name](Place(self._place.peer, folder))

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[tuple[System, Processes]]:
        system = self._system()
        logs = self._file.parent / "logs" / self._name
        logs.mkdir(parents=True, exist_ok=True)
        processes = Processes(system.services, logs, restarts=system.restarts)
        try:
            await processes.start()
            if not await self._answers(system, START_SECONDS):
                raise ConfigError(f"{self._name} does not answer within {START_SECONDS:g} s: see {logs}")
            # Its first requests are slow.
            await Load(system.url).at_once(self._new(system, 8))
            yield system, processes
        finally:
            await processes.close()

    async def _right(self, system: System, fault: Fault) -> None:
        requests = bodies(system.model, _seed(fault, self._number), REQUESTS, RIGHT)
        load = Load(system.url)
        keep(
            self._file,
            Trial(RIGHT, fault.name, self._number, await load.at_once(requests), 0, 0, load.errors),
        )

    async def _trial(self, system: System, processes: Processes, fault: Fault) -> Trial:
        requests = bodies(system.model, _seed(fault, self._number), REQUESTS)
        load, broken_at = Load(system.url), [0.0]

        async def act() -> None:
            broken_at[0] = time.monotonic()
            await fault.act(system, processes)

        answers = await load.at_a_rate(requests, act)
        ended = time.monotonic()
        seconds = RETURN_SECONDS if system.restarts else ALONE_SECONDS
        by_hand = 0 if await self._answers(system, seconds) else 1
        # Who asked last and failed would have had a token when it was back.
        load.times.append(ended if by_hand or answers[-1] else time.monotonic())
        stall = load.stall(broken_at[0])
        return Trial(self._name, fault.name, self._number, answers, stall, by_hand, load.errors)

    async def _answers(self, system: System, seconds: float) -> bool:
        """Whether a text and a new picture are answered within that time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(deadline - time.monotonic(), 1.0)):
                    if all(await Load(system.url).at_once(self._new(system, 2))):
                        return True
            await asyncio.sleep(_PROBE_SECONDS)
        return False

    def _new(self, system: System, count: int) -> list[bytes]:
        self._probes += 1
        return bodies(system.model, 100_000 + 1000 * self._number + self._probes, count)


def _say(trial: Trial) -> None:
    told = f"{trial.failed} failed, stall {trial.stall:.1f} s, by hand {trial.by_hand} {trial.errors[:1]}"
    print(f"{trial.system}, {trial.fault}, {trial.number}: {told}", file=sys.stderr, flush=True)


#: Seeds by fault: the same requests for every system.
_PARTS = (
    NOTHING,
    "encoder",
    "decoding server",
    "prefill server",
    "worker before vLLM",
    "store",
    "proxy",
    EMBEDDINGS,
)
_WHATS = ("", KILLED, CUT, LOST)


def _seed(fault: Fault, number: int) -> int:
    return 100 * number + 10 * _PARTS.index(fault.part) + _WHATS.index(fault.what)


def _all_faults() -> list[Fault]:
    """Every fault of any system."""
    broken = [Fault(part, what) for part in _PARTS[1:-1] for what in (KILLED, CUT)]
    return [Fault(NOTHING, ""), *broken, Fault(EMBEDDINGS, LOST)]


def page(trials: Sequence[Trial], before: str = "") -> str:
    """Of these trials, and of those that the page `before` has."""
    right = {(t.fault, t.number): t.answers for t in trials if t.system == RIGHT}
    measured = [Row.of(t, right.get((t.fault, t.number))) for t in trials if t.system != RIGHT]
    rows = added([*rows_of(before), *measured])
    names = [Fault(part, what).name for what in _WHATS for part in _PARTS]
    cells = [rows[name, system].cells for name in names for system in SYSTEMS if (name, system) in rows]
    reasons = reasons_of(before) | {
        f"{t.system}, {t.fault}: {' '.join(t.errors[0].split())}"
        for t in trials
        if t.errors and t.system != RIGHT
    }
    lines = table(HEAD, cells, (0, 1))
    return fill(
        "kills", commit=commit(), table="\n".join(lines),
        reasons="\n".join(f"- `{reason}`" for reason in sorted(reasons)),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", nargs="?", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS), help="answers are compared with those of native, where it ran"
    )
    parser.add_argument("--faults", default="*", help="a pattern of their names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no trial is begun")
    parser.add_argument("--add", action="store_true", help=f"to the runs that {PAGE.name} has")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    file = options.results / "kills.jsonl"
    if options.peer is None:
        before = PAGE.read_text() if options.add else ""
        publish(page(kept([file], Trial), before), PAGE, write=options.write)
        return
    # So that the processes end with this one, however it is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        place = Place(options.peer.resolve(), Path(folder))
        until = time.monotonic() + 60 * options.minutes
        for number in range(options.rounds):
            for name in options.systems.split(","):
                asyncio.run(Run(name, number, place, file, options.faults, until).measure())


if __name__ == "__main__":
    main()
