"""Loading says how far it is: every byte of a side's own tensors, up to the last."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from support.data.checkpoints import FAMILIES, build_checkpoint
from triptych.base.progress.progress import BYTES, StepState, shown_by
from triptych.models.checkpoint.folder import Checkpoint, Cut
from triptych.models.registry import family_of, load_decoder, load_encoder

CPU = torch.device("cpu")


class Recorder:
    """A renderer that keeps every advance."""

    interval = 0.0

    def __init__(self) -> None:
        self.states: list[StepState] = []

    def show(self, state: StepState) -> None:
        self.states.append(state)

    def ready(self) -> None:
        pass

    def of(self, label: str) -> list[StepState]:
        return [state for state in self.states if state.label == label]


@pytest.mark.parametrize("variant", ["", "hub+sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_count_their_tensors_bytes_up_to_the_last(family: str, variant: str) -> None:
    path = build_checkpoint(family, variant=variant)
    names = family_of(path).keys
    checkpoint = Checkpoint(path)
    for keys, load in ((names.encoder_names, load_encoder), (names.decoder_names, load_decoder)):
        options = {"attn_implementation": "sdpa"} if load is load_decoder else {}
        recorder = Recorder()
        with shown_by(recorder):
            load(path, device=CPU, dtype=torch.float32, **options)  # type: ignore[operator]
        states = recorder.of("loading weights")
        own = [tensor for _, tensor in checkpoint.read(keys(checkpoint.files))]
        assert states[0].total == sum(tensor.nbytes for tensor in own)
        assert states[0].unit == BYTES
        assert len(states) == len(own) + 2
        # Counted, not only declared at the end.
        assert states[-2].done == states[-1].done == states[0].total
        assert states[-1].ended and not states[-1].failed


def test_a_part_of_a_tensor_counts_as_its_part() -> None:
    checkpoint = Checkpoint(build_checkpoint("llava"))
    key, tensor = next((key, one) for key, one in checkpoint.read(checkpoint.files) if one.dim() == 2)
    cuts = {key: Cut(0, 0, tensor.shape[0] // 2, tensor.shape[0])}
    assert checkpoint.nbytes([key]) == tensor.nbytes
    ((_, part),) = checkpoint.read([key], cuts)
    assert checkpoint.nbytes([key], cuts) == part.nbytes == tensor.nbytes // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_tensors_of_every_dtype_have_their_size(tmp_path, dtype) -> None:
    path = build_checkpoint("llava")
    config = (path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    save_file(
        {"a": torch.zeros(3, 5, dtype=dtype), "b": torch.zeros((), dtype=dtype)}, tmp_path / "x.safetensors"
    )
    assert Checkpoint(tmp_path).nbytes(["a", "b"]) == 16 * dtype.itemsize
