"""Whether this Python has a torch that `make gpu` can use. Run as a file before anything is installed."""

from __future__ import annotations

import sys

_INSTALL = (
    "pip install torch==2.13.0 (PyPI's wheel for Linux is the one for CUDA), or give PYTHON= of an image"
)


def missing_torch(*, cuda: bool = True) -> str:
    """What is missing, and the remedy; "" where nothing is."""
    try:
        import torch
    except ModuleNotFoundError:
        return f"{sys.executable} has no torch: {_INSTALL} that has it"
    if cuda and torch.version.cuda is None:
        return f"torch {torch.__version__} of {sys.executable} is not for CUDA: {_INSTALL} that has it"
    if cuda and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no CUDA device: look at `nvidia-smi` and the driver's version"
        )
    return ""


if __name__ == "__main__":
    sys.exit(missing_torch())
