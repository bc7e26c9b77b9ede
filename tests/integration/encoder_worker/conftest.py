"""One tiny encoder for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from triptych.models.base import EncoderSide
from triptych.models.registry import load_encoder


@pytest.fixture(scope="session")
def encoder() -> Iterator[EncoderSide]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_encoder(build_checkpoint("qwen3_vl"), device=torch.device("cpu"), dtype=torch.float32)
    torch.set_num_threads(threads)
