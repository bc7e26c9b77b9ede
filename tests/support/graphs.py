"""A graph backend for tests on a CPU that replays as a CUDA graph does: the same operators, and no Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from triptych.base.machine.graphs import CapturedGraph, GraphBackend
from triptych.models.fused import layers
from triptych.pd_worker.attention import metadata

#: Operators whose result, or its size, the host has to know: on CUDA they end a capture.
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "repeat_interleave"}
#: Operators that look for the true entries of a mask, and wait for how many there are.
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
#: Methods of tensors on a CPU that no dispatch mode sees.
_READING = ("tolist", "numpy")


class Operators(TorchDispatchMode):
    """Counts the operators that run in it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class RecordingBackend(GraphBackend):
    """Records the torch operators of one run, and replays exactly these on the same buffers.

    What Python decided at the capture (sizes, branches, numbers read from lists) stays as it was. An operator
    that would wait for a device raises RuntimeError. The CPU's kernels, which never run on CUDA and are no
    operators of torch, are off in a capture.
    """

    mode = "static"

    def capture(self, run: Callable[[], object]) -> CapturedGraph:
        run()
        recorder = _Recorder()
        with recorder, _unreadable(), _without_kernels():
            run()
        return CapturedGraph(replay=recorder.replay, run=run)


@contextmanager
def _without_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "rotates", lambda *args: False)
        patch.setattr(metadata, "fits", lambda *args: False)
        yield


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _WAITING or (name in _INDEXED and _has_mask(args[1])):
            raise RuntimeError(f"{func} waits for the device during a capture")
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        made: dict[int, torch.Tensor] = {}

        def now(value: Any) -> Any:
            return made.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, recorded in self._calls:
            out = func(*tree_map(now, args), **tree_map(now, kwargs))
            for old, new in zip(tree_leaves(recorded), tree_leaves(out), strict=True):
                if isinstance(old, torch.Tensor):
                    made[id(old)] = new


class Waits(TorchDispatchMode):
    """Counts what would wait for a device in the calling thread, inside `with`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        for name in _READING:
            self._patch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patch.undo()

    def _counting(self, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def counting(tensor: torch.Tensor, *args: Any) -> Any:
            self.names.append(name)
            return read(tensor, *args)

        return counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _WAITING or (name in _INDEXED and _has_mask(args[1])):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


@contextmanager
def _unreadable() -> Iterator[None]:
    """Tensors raise RuntimeError where the host would read all of one."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a tensor is read on the host during a capture")

    for name in _READING:
        setattr(torch.Tensor, name, refuse)
    try:
        yield
    finally:
        for name in _READING:
            delattr(torch.Tensor, name)
