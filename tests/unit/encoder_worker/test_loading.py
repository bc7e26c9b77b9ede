"""The largest batch of a real tiny tower, on a fake device and on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from triptych.base.config import MIB, EncoderConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.device_memory import CpuMemory
from triptych.encoder_worker import loading
from triptych.encoder_worker.loading import check_encoder_memory, largest_batch
from triptych.models.base import EncoderSide
from triptych.models.registry import load_encoder

CONFIG = EncoderConfig(max_image_pixels=256 * 256, encoder_batch_patches=1024)


class FakeMemory:
    """A device on which this process holds 8 MiB and a batch takes `step` more."""

    share = 0.5

    def __init__(self, size: int, step: int) -> None:
        self._size, self._step = size, step

    def free(self) -> int:
        return self._size - 8 * MIB

    def used(self) -> int:
        return 8 * MIB

    def reset_peak(self) -> None:
        return

    def peak(self) -> int:
        return 8 * MIB + self._step


def _encoder(family: str) -> EncoderSide:
    path: Path = build_checkpoint(family)
    return load_encoder(path, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def encoder() -> EncoderSide:
    return _encoder("qwen3_vl")


def test_the_largest_batch_has_the_largest_pictures_and_as_many_as_a_batch_takes(
    encoder: EncoderSide,
) -> None:
    batch = largest_batch(CONFIG, encoder)
    assert sum(item.cost for item in batch) <= 1024 < sum(item.cost for item in batch) + batch[0].cost
    small = largest_batch(EncoderConfig(max_image_pixels=64 * 64, encoder_batch_patches=1024), encoder)
    assert batch[0].cost > small[0].cost
    one = largest_batch(EncoderConfig(max_image_pixels=256 * 256, encoder_batch_patches=1), encoder)
    assert len(one) == 1, "an item that is larger than a batch runs alone"


def test_a_batch_that_fits_says_what_it_takes_and_one_that_does_not_is_refused(encoder: EncoderSide) -> None:
    encoded = []
    inner = encoder.encode
    encoder.encode = lambda items: encoded.append(len(items)) or inner(items)  # type: ignore[method-assign,func-returns-value]
    try:
        assert check_encoder_memory(CONFIG, encoder, FakeMemory(64 * MIB, 20 * MIB)) == 20 * MIB
        with pytest.raises(
            ConfigError, match=r"8.0 MiB for its weights and 40.0 MiB .*--encoder-batch-patches"
        ):
            check_encoder_memory(CONFIG, encoder, FakeMemory(64 * MIB, 40 * MIB))
    finally:
        del encoder.encode
    assert encoded == [len(largest_batch(CONFIG, encoder))] * 2


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "whisper", "t5"])
def test_every_kind_of_tower_runs_its_largest_batch_on_a_cpu(family: str) -> None:
    tower, config = _encoder(family), EncoderConfig(max_image_pixels=128 * 128, encoder_batch_patches=64)
    assert check_encoder_memory(config, tower, CpuMemory()) >= 0


def test_a_tower_on_a_cpu_starts_without_that(encoder: EncoderSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "check_encoder_memory", lambda *_: pytest.fail("a batch is run"))
    assert loading.activation_bytes(CONFIG, encoder) == 0


def test_a_tower_on_a_gpu_runs_it_at_the_start(encoder: EncoderSide, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(64 * MIB, 20 * MIB)
    monkeypatch.setattr(loading, "memory_of", lambda device: memory)
    # The tensors stay where they are: only what is said of them is another device's.
    monkeypatch.setattr(loading, "check_encoder_memory", lambda *given: MIB if given[2] is memory else 0)
    monkeypatch.setattr(encoder, "device", torch.device("cuda:1"))
    assert loading.activation_bytes(CONFIG, encoder) == MIB
