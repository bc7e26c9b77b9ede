"""Loading an encoder, and copies of rows to the host."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from triptych.base.config import MIB, EncoderConfig
from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.machine.device import CpuMemory
from triptych.encoder_worker import loading
from triptych.encoder_worker.host_copier import HostCopier, copied
from triptych.encoder_worker.job_spec import ItemFormat
from triptych.encoder_worker.loading import check_encoder_memory, largest_batch
from triptych.encoder_worker.media.formats import MAX_MEDIA_BYTES
from triptych.encoder_worker.server import MAX_TIMEOUT, parse_job
from triptych.models.base import EncoderSide
from triptych.models.registry import load_encoder
from triptych.protos import encoder_pb2

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


def test_the_largest_batch_has_the_largest_pictures_and_as_many_as_a_batch_takes(encoder):
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


FORMAT = ItemFormat("a" * 64, "image", 8, "float32")
GOOD = {
    "job_id": "j",
    "mm_hash": "b" * 64,
    "namespace": "a" * 64,
    "modality": "image",
    "media_bytes": 5,
    "timeout": 10.0,
}


def job(**changes: object) -> encoder_pb2.EncodeJob:
    return encoder_pb2.EncodeJob(**{**GOOD, **changes})


def test_a_good_job_is_taken() -> None:
    spec = parse_job(job(processor_options='{"max_pixels": 7}', re_encode=True), FORMAT)
    assert (spec.mm_hash, spec.media_bytes, spec.re_encode) == ("b" * 64, 5, True)
    assert spec.processor_options == {"max_pixels": 7}
    assert (spec.tenant, spec.priority) == ("", 0)
    assert parse_job(job(priority=-7), FORMAT).priority == -7
    assert parse_job(job(tenant="0123456789abcdef"), FORMAT).tenant == "0123456789abcdef"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tenant", "alice"),
        ("mm_hash", "b" * 63),
        ("mm_hash", "B" * 64),
        ("namespace", "c" * 64),
        ("modality", "text"),
        ("media_bytes", 0),
        ("media_bytes", MAX_MEDIA_BYTES + 1),
        ("timeout", 0.0),
        ("timeout", -1.0),
        ("timeout", float("nan")),
        ("damaged_digest", "x"),
        ("tenant", "alice"),
        ("tenant", "A" * 16),
        ("processor_options", "[1]"),
        ("processor_options", "{"),
        ("processor_options", "[" * 60000),
        ("processor_options", '{"a": "' + "x" * 70000 + '"}'),
        ("processor_options", '{"a": 1180591620717411303424}'),
        ("processor_options", '{"a": "\\ud800"}'),
        ("processor_options", '{"a":' * 600 + "1" + "}" * 600),
    ],
)
def test_a_bad_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_job(job(**{field: value}), FORMAT)
    assert caught.value.param == field


def test_no_job_lives_longer_than_the_longest() -> None:
    assert parse_job(job(timeout=1e9), FORMAT).timeout == MAX_TIMEOUT


SHAPES = [(3, 8), (0, 8), (40, 8), (1, 4), (7, 3)]


def empty(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(output.shape, dtype=output.dtype) for output in outputs]


class Device:
    """Copies to the host that have no effect before a buffer's `wait`; `calls` are in their order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.copy = torch.Tensor.copy_
        copy_later = self.copy_later
        patch.setattr(
            torch.Tensor,
            "copy_",
            lambda target, source, non_blocking=False: copy_later(target, source, non_blocking),
        )

    def copy_later(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if not non_blocking:
            self.calls.append("host copy")
            return self.copy(target, source)
        self.calls.append("device copy")
        self.pending.append((target, source.clone()))
        return target


class Buffer:
    """One buffer of the device. Its wait ends the copies that were begun before its mark, in their order."""

    def __init__(self, name: str, size: int, device: Device | None = None) -> None:
        self.name, self.bytes = name, torch.empty(size, dtype=torch.uint8)
        self._device, self._marked = device, 0
        if device is not None:
            self.bytes.fill_(255)

    def record(self) -> None:
        if (device := self._device) is not None:
            device.calls.append(f"mark {self.name}")
            self._marked = len(device.pending)

    def wait(self) -> None:
        if (device := self._device) is not None:
            device.calls.append(f"wait for {self.name}")
            for index in range(self._marked):
                device.copy(*device.pending[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4, 32, 100, 1 << 16])
def test_outputs_arrive_unchanged_with_any_buffer_size(size: int, dtype: torch.dtype) -> None:
    outputs = [torch.randn(shape).to(dtype) for shape in SHAPES]
    outputs.append(torch.randn(5, 6).to(dtype).T)
    targets = empty(outputs)
    copies = copied(outputs, (Buffer("a", size), Buffer("b", size)), targets)
    for (copy, finite), target, output in zip(copies, targets, outputs, strict=True):
        assert copy is target and torch.equal(copy, output) and finite


def test_a_buffer_is_emptied_while_the_device_fills_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 bytes of bounds and 72 of outputs, through two buffers of 40."""
    outputs = [torch.full((6,), float(number)) for number in range(3)]
    device = Device(monkeypatch)
    copies = copied(outputs, (Buffer("a", 40, device), Buffer("b", 40, device)), empty(outputs))
    assert all(torch.equal(copy, output) for (copy, _), output in zip(copies, outputs, strict=True))
    assert [call for call in device.calls if not call.endswith("copy")] == [
        *("mark a", "mark b", "wait for a", "mark a", "wait for b", "wait for a")
    ]
    marked = device.calls.index("mark b")
    assert "host copy" not in device.calls[:marked], "nothing is read before the next copies have begun"


def test_nothing_is_written_over_before_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [torch.full((6,), float(number)) for number in range(20)]
    device = Device(monkeypatch)
    copies = copied(outputs, (Buffer("a", 16, device), Buffer("b", 16, device)), empty(outputs))
    assert all(torch.equal(copy, output) for (copy, _), output in zip(copies, outputs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_output_that_is_not_finite_is_told_from_the_others(value: float, dtype: torch.dtype) -> None:
    outputs = [torch.randn(4, 8).to(dtype) for _ in range(3)]
    outputs[1][3, 7] = value
    for copies in (
        copied(outputs, (Buffer("a", 64), Buffer("b", 64)), empty(outputs)),
        HostCopier(torch.device("cpu"))(outputs),
    ):
        assert [finite for _, finite in copies] == [True, False, True]


def test_on_a_cpu_a_contiguous_output_is_not_copied() -> None:
    output = torch.randn(3, 4)
    assert HostCopier(torch.device("cpu"))([output])[0][0].data_ptr() == output.data_ptr()


def test_on_a_cpu_an_output_goes_into_its_target() -> None:
    output, target = torch.randn(3, 4).T, torch.empty(4, 3)
    assert HostCopier(torch.device("cpu"))([output], [target])[0][0] is target
    assert torch.equal(target, output)
