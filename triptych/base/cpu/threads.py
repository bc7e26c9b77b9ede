"""CPU affinity and thread counts of a process that computes: torch's, OpenMP's and other libraries'."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from triptych.base.errors import ConfigError
from triptych.base.machine.resources import requested_cpus, threads_of_one_worker, usable_cpus
from triptych.base.parent import set_variable

logger = logging.getLogger(__name__)

_SPAN = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def parse_cpus(text: str) -> frozenset[int]:
    """The cores of "0,2-3"; ConfigError for anything else."""
    cores: set[int] = set()
    for piece in text.split(","):
        span = _SPAN.fullmatch(piece.strip())
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise ConfigError(f"--cpus {text!r} names no cores: write them like 0,1 or 2-3")
        cores |= set(range(int(span[1]), int(span[2] or span[1]) + 1))
    return frozenset(cores)


def pin(text: str) -> None:
    """This process runs on the cores of `text` only; call it before threads start. "" changes nothing."""
    if not text:
        return
    cores, allowed = parse_cpus(text), os.sched_getaffinity(0)
    if not cores <= allowed:
        raise ConfigError(
            f"--cpus {text!r}: this process may use the cores {','.join(map(str, sorted(allowed)))} only"
        )
    os.sched_setaffinity(0, cores)


class OwnCore:
    """A core claimed for one process, whose threads are pinned to it from `pin` to `unpin`, again and again.

    Where the kernel refuses, such as for a core that was taken away, it is given up: nothing is raised.
    """

    def __init__(self, core: int, claim: socket.socket) -> None:
        self.core = core
        self._claim = claim
        self._all = os.sched_getaffinity(0)
        self._pinned = False
        self._given_up = False

    def pin(self) -> None:
        """All threads of this process run on the core only. Costs nothing while they do already."""
        if not self._pinned:
            self._pinned = True
            self._move({self.core})

    def unpin(self) -> None:
        """They run on any core of the process. Costs nothing while they do already."""
        if self._pinned:
            self._pinned = False
            self._move(self._all)

    def release(self) -> None:
        """Another process may claim the core. Idempotent."""
        self.unpin()
        self._claim.close()

    def _move(self, cores: Collection[int]) -> None:
        if self._given_up:
            return
        try:
            for thread in os.listdir("/proc/self/task"):
                # A thread may have ended meanwhile.
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), cores)
        except OSError as error:
            self._given_up = True
            logger.warning("core %d is given up: %s", self.core, error.strerror)


def claim_core() -> OwnCore | None:
    """The last core of this process that no other process has claimed; None where that is the first one.

    The first one stays shared. A claim ends with its process.
    """
    for core in sorted(os.sched_getaffinity(0), reverse=True)[:-1]:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # An abstract name: in no file system, and gone when the process is.
            claim.bind(f"\0triptych-core-{core}")
        except OSError:
            claim.close()
            continue
        return OwnCore(core, claim)
    return None


P = ParamSpec("P")
T = TypeVar("T")

#: Decoders narrower than this lose more in the barriers between threads than they win by them, in steps of
#: fewer rows than that (docs/performance.md).
_WIDE, _MANY_ROWS = 1024, 256


#: Seconds for which a thread keeps the interpreter's lock from those that wait for it; Python's own are ten
#: times as many. An engine's thread gives it up for each operation: while two others read prompts, a step
#: would wait as long hundreds of times.
SWITCH_SECONDS = 0.0005


def share_interpreter() -> None:
    """Threads that compute let others have the interpreter sooner."""
    sys.setswitchinterval(SWITCH_SECONDS)


def library_environment() -> None:
    """What libraries read when they are imported: their threads, how OpenMP's wait, and torch's memory."""
    # Embeddings of all sizes come and go beside a KV cache that has the rest of a GPU: segments that grow
    # leave no gaps which no tensor fits into.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        set_variable("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Where processes share cores, a spinning OpenMP thread steals the core that its own barrier waits for.
    set_variable("OMP_WAIT_POLICY", "PASSIVE")
    set_variable("KMP_BLOCKTIME", "0")
    # But the threads of one step meet some thousand times a second, and to be woken takes long: they spin for
    # some 60 microseconds first (benchmarks/results/earlier.md).
    set_variable("GOMP_SPINCOUNT", "4000")
    # Libraries count the cores of the machine: a pod of 4 CPUs on 64 cores would start a thread for each.
    for name, count in (
        ("OMP_NUM_THREADS", threads_of_one_worker()),
        ("RAYON_NUM_THREADS", usable_cpus()),
        ("TORCHINDUCTOR_COMPILE_THREADS", min(32, usable_cpus())),
    ):
        set_variable(name, str(count))


def tower_threads(threads: int, cpus: str) -> int:
    """Torch threads of a tower: --threads, one per CPU of --cpus or of the request, or half of the shared."""
    usable = threads_of_one_worker()
    return threads or (usable if cpus or requested_cpus() else max(1, usable // 2))


def media_threads(threads: int) -> int:
    """Threads that decode media: --decode-threads, or one per core of the affinity, quota and request."""
    return threads or usable_cpus()


def decoder_threads(threads: int, hidden_size: int) -> int:
    """Torch threads of a decode step of a decoder of this width: --threads, or chosen."""
    return threads or (1 if hidden_size < _WIDE else threads_of_one_worker())


def many_rows(threads: int, hidden_size: int) -> int:
    """Rows from which on a step of this decoder takes more threads than `decoder_threads`: all of its cores.

    0 where none does: --threads, or a decoder that always takes them.
    """
    return 0 if threads or hidden_size >= _WIDE else _MANY_ROWS


def threads_beside(others: int, minimum: int, maximum: int, cores: int) -> int:
    """Threads of a worker beside `others` threads of other workers: the cores that these leave, in bounds."""
    return max(minimum, min(maximum, cores - others))


def threads_of_rank(threads: int, ranks: int) -> int:
    """Torch threads of each of a worker's ranks, which share the `threads` of the worker."""
    return max(1, threads // ranks)


def use_threads(count: int) -> None:
    """`count` torch threads within an operator; between operators one per CPU, set once in a process."""
    # Not at the top: `library_environment` comes before the first import of torch.
    import torch

    torch.set_num_threads(count)
    # Torch takes the second number once, and raises from then on.
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(usable_cpus())


def use_threads_here(count: int) -> None:
    """`count` torch threads within the operators of the calling thread, and of threads not yet computing."""
    import torch

    torch.set_num_threads(count)


def in_short_lived_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns or raises, from a thread that ends with it, and with it its OpenMP threads.

    Every thread that computes in parallel keeps OpenMP threads until it ends. Once those of a process are
    more than its cores, none of them spins any more before it sleeps: a step of two threads, which meet some
    thousand times a second, then takes half as long again. So what is computed once must leave none behind.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="short-lived") as executor:
        return executor.submit(work, *args, **kwargs).result()
