"""Thread counts of a process that computes: torch's, OpenMP's and those of other libraries."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from triptych.base.machine.resources import requested_cpus, threads_of_one_worker, usable_cpus

P = ParamSpec("P")
T = TypeVar("T")

#: Decoders narrower than this lose more in the barriers between threads than they win by them.
_WIDE = 1024


def library_environment() -> None:
    """What libraries read when they are imported: their threads, how OpenMP's wait, and torch's memory."""
    # Embeddings of all sizes come and go beside a KV cache that has the rest of a GPU: segments that grow
    # leave no gaps which no tensor fits into.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Where processes share cores, a spinning OpenMP thread steals the core that its own barrier waits for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    # But the threads of one step meet some thousand times a second, and to be woken takes long: they spin for
    # some 60 microseconds first (benchmarks/results/earlier.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
    # Libraries count the cores of the machine: a pod of 4 CPUs on 64 cores would start a thread for each.
    for name, count in (
        ("OMP_NUM_THREADS", threads_of_one_worker()),
        ("RAYON_NUM_THREADS", usable_cpus()),
        ("TORCHINDUCTOR_COMPILE_THREADS", min(32, usable_cpus())),
    ):
        os.environ.setdefault(name, str(count))


def tower_threads(threads: int, cpus: str) -> int:
    """Torch threads of a tower: --threads, one per CPU of --cpus or of the request, or half of the shared."""
    usable = threads_of_one_worker()
    return threads or (usable if cpus or requested_cpus() else max(1, usable // 2))


def media_threads(threads: int) -> int:
    """Threads that decode media: --decode-threads, or one per core of the affinity, quota and request."""
    return threads or usable_cpus()


def decoder_threads(threads: int, hidden_size: int) -> int:
    """Torch threads of a decoder of this width: --threads, or chosen."""
    return threads or (1 if hidden_size < _WIDE else threads_of_one_worker())


def threads_beside(others: int, least: int, most: int, cores: int) -> int:
    """Threads of a worker beside `others` threads of other workers: the cores that these leave, in bounds."""
    return max(least, min(most, cores - others))


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
