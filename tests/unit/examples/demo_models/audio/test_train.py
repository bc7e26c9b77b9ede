"""Training: a run that was stopped goes on as if it had not been."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from examples.demo_models.audio.train import Run, arguments_of
from examples.demo_models.training_state import rate_at


def test_the_rate_warms_up_stays_and_falls_to_nothing() -> None:
    rates = [rate_at(step, 1000, 2.0, 0.4, 50) for step in (0, 24, 49, 600, 800, 1000)]
    assert rates == [2.0 / 50, 1.0, 2.0, 2.0, 1.0, 0.0]


def test_a_resumed_run_learns_what_an_unbroken_one_does(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--steps", "4", "--batch", "1"]
    unbroken = Run(arguments_of(words))
    for step in range(2):
        unbroken.one_step(unbroken.batch_of(step))
    unbroken.save()
    resumed = Run(arguments_of([*words, "--resume"]))
    assert resumed.state.step == 2
    for run in (unbroken, resumed):
        run.one_step(run.batch_of(2))
    for name, parameter in unbroken.state.named.items():
        assert torch.equal(parameter, resumed.state.named[name]), name
        assert torch.equal(unbroken.state.average[name], resumed.state.average[name]), name


def test_what_is_exported_is_the_average_of_the_weights(tmp_path: Path) -> None:
    run = Run(arguments_of(["--out", str(tmp_path), "--steps", "4", "--batch", "1"]))
    for step in range(2):
        run.one_step(run.batch_of(step))
    run.save()
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert set(stored) == {name for name, _ in run.model.named_parameters()}
    for name, tensor in stored.items():
        assert torch.equal(tensor, run.state.average[name].half()), name
    name = "model.encoder.layers.0.fc1.weight"
    assert not torch.equal(stored[name], run.state.named[name].half())
