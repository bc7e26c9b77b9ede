"""What a training run learns and goes on from: weights, their running average, the optimizer, the step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from examples.demo_models.optimizer import Optimizer

_CLIP = 1.0  # norm of the gradient
_AVERAGED = 0.98  # of the running average of the weights


def rate_at(step: int, steps: int, peak: float, decayed: float, warm_up: int) -> float:
    """`warm_up` steps of rising rate, a plateau, a linear fall over the last `decayed` part of the run."""
    left = (steps - step) / max(1.0, steps * decayed)
    return peak * min(1.0, (step + 1) / warm_up, max(left, 0.0))


class TrainingState:
    """`named` are the parameters, `average` their running average, `step` the steps learnt."""

    def __init__(self, named: dict[str, nn.Parameter], weight_decay: float) -> None:
        self.named = named
        self.average = {n: p.detach().clone() for n, p in named.items()}
        self.step = 0
        self._optimizer = Optimizer(named, weight_decay)

    def learn(self, rate: float) -> None:
        """One step down the gradients, which are cleared; the average follows."""
        self._optimizer.step(rate, _CLIP)
        self.step += 1
        keep = min(_AVERAGED, self.step / (self.step + 9))
        with torch.no_grad():
            for name, parameter in self.named.items():
                self.average[name].lerp_(parameter, 1 - keep)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The parameters are their average within the `with`."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.named.items():
            kept = parameter.detach().clone()
            parameter.copy_(self.average[name])
            self.average[name].copy_(kept)

    def load(self, folder: Path) -> None:
        """The state that was last saved in the folder."""
        self.step = json.loads((folder / "state.json").read_text())["step"]
        tensors = load_file(folder / f"state-{self.step}.safetensors")
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(tensors[f"weight.{name}"])
                self.average[name].copy_(tensors[f"average.{name}"])
        self._optimizer.load(tensors, self.step)

    def save(self, folder: Path, seed: int) -> None:
        """The tensors first, as a new file, then the pointer to it; then older ones go."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"weight.{n}": p.detach() for n, p in self.named.items()}
        tensors |= {f"average.{n}": t for n, t in self.average.items()}
        tensors |= self._optimizer.state()
        save_file(tensors, folder / f"state-{self.step}.safetensors")
        pointer = folder / "state.json.new"
        pointer.write_text(json.dumps({"step": self.step, "seed": seed}) + "\n")
        pointer.replace(folder / "state.json")
        for old in folder.glob("state-*.safetensors"):
            if old.name != f"state-{self.step}.safetensors":
                old.unlink()
