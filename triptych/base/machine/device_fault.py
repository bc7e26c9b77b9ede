"""Device errors after which this process cannot use the device any more."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from triptych.base.errors import InternalError

logger = logging.getLogger(__name__)

#: cudaError_t values that leave the process's context unusable: every later call returns them too.
_STICKY_CODES = frozenset({46, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999})
#: The same errors by message, for libraries that raise a plain RuntimeError.
_STICKY_TEXTS = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "hardware stack error",
    "operation not supported on global/shared address space",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "launch timed out and was terminated",
    "context is destroyed",
    "unknown error",
)
_PREFIXES = ("cuda error", "hip error")


class DeviceLost(BaseException):
    """The device is unusable in this process. A BaseException, since Exceptions are caught in many places."""


def check_device(error: BaseException | None, device: torch.device) -> None:
    """Raises DeviceLost where `error` means that the device is lost, or where the device fails a small test.

    Called after every failure of an engine; the test is made on accelerators only.
    """
    if error is not None and is_sticky(error):
        raise DeviceLost(f"{device}: {error}") from error
    if device.type == "cpu":
        return
    try:
        probe(device)
    except torch.OutOfMemoryError:
        logger.warning("%s has no free memory for a test", device)
    except Exception as failure:
        raise DeviceLost(f"{device} fails a test: {failure}") from failure


def failure_of(error: Exception, device: torch.device, what: str) -> Exception:
    """`error`; where the device had no memory for `what`, an InternalError that tells the client so."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    return InternalError(f"the worker's {device} had no free memory for {what}: send less at a time")


def is_sticky(error: BaseException) -> bool:
    """Whether the error, or one in its chain of causes, is one that every later call would raise."""
    return any(_is_sticky(link) for link in _chain(error))


def probe(device: torch.device) -> None:
    """Runs one small computation and waits for it; raises the device's error."""
    assert float((torch.ones(1, device=device) + 1).cpu()) == 2.0, "the device computes wrong results"


def _is_sticky(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    if getattr(error, "error_code", None) in _STICKY_CODES:
        return True
    text = str(error).lower()
    return any(prefix in text for prefix in _PREFIXES) and any(pattern in text for pattern in _STICKY_TEXTS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
