"""`triptych serve` with its fork server and without: seconds to ready, and memory of all its processes.

    python -m benchmarks micro serve_start [--rounds 5]

The demo model, with the workers that `serve` starts by default; the two in turns. Memory is the sum of the
proportional set sizes a second after the cluster is ready.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.baselines.matrix import System
from benchmarks.baselines.servers import serving, usages
from benchmarks.result_page import spread, table

_WORDS = ("serve", "--port", "${PORT}", "--grpc-port", "${GRPC_PORT}", "--run-dir", "${SCRATCH}/run")
#: The command of `triptych` where no worker may be forked.
_EXEC = """
from triptych.apps.cli import main
from triptych.apps.launch.fork.client import ForkServer
ForkServer.possible = staticmethod(lambda device: False)
main()
"""
COMMANDS = {"fork server": ("-m", "triptych.apps.cli"), "exec": ("-c", _EXEC)}


def measure(name: str) -> tuple[float, float]:
    """Seconds to ready, and MB."""
    system = System(
        name=name.replace(" ", "-"),
        commands=((sys.executable, *COMMANDS[name], *_WORDS),),
        url="http://127.0.0.1:${PORT}",
        ports=("PORT", "GRPC_PORT"),
        ready=("/ready",),
    )
    with serving(system, "") as server:
        time.sleep(1.0)
        memory = sum(usage.memory_mb for usage in usages(server.pids, memory=True).values())
        return server.seconds_to_ready, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for number in range(parser.parse_args().rounds):
        for name in list(COMMANDS)[:: -1 if number % 2 else 1]:
            found[name].append(measure(name))
    rows = [[name, *map(spread, zip(*runs, strict=True))] for name, runs in found.items()]
    sys.stdout.write("\n".join([*table(["workers by", "ready, s", "memory, MB"], rows), ""]))
