"""Muon for the matrices of the blocks, AdamW for the rest; its state goes into safetensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn

_MOMENTUM = 0.95
_SCALE = 0.4  # root mean square of a step of Muon in learning rates; of Adam it is about 0.3
_BETAS = (0.9, 0.98)
_LARGEST_SIDE = 512  # orthogonalising a 512x512 matrix costs more than it gains here


def orthogonal(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[m, n] with the same row and column spaces and singular values near one (Newton-Schulz)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x: torch.Tensor = (matrix.T if tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def _for_muon(name: str, parameter: nn.Parameter) -> bool:
    inside = ".layers." in name or ".blocks." in name or "merger" in name
    return inside and parameter.ndim == 2 and min(parameter.shape) < _LARGEST_SIDE


def _sum_over_processes(tensors: list[torch.Tensor]) -> None:
    """In place, in one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(flat)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


class Optimizer:
    """One learning rate for both: Muon's steps are scaled to the size of Adam's."""

    def __init__(self, named: dict[str, nn.Parameter], weight_decay: float) -> None:
        self._named = named
        self._decay = weight_decay
        muon = [n for n, p in named.items() if _for_muon(n, p)]
        self._momentum = {n: torch.zeros_like(named[n]) for n in muon}
        rest = [p for n, p in named.items() if n not in self._momentum]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in rest if p.ndim > 1]},
            {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, betas=_BETAS, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, rate: float, clip: float) -> None:
        """One step down gradients brought to at most the norm `clip`; they are cleared."""
        if distributed.is_initialized():
            grads = [p.grad for p in self._named.values() if p.grad is not None]
            _sum_over_processes(grads)
            for grad in grads:
                grad /= distributed.get_world_size()
        nn.utils.clip_grad_norm_(self._named.values(), clip)
        for name, update in self._updates().items():
            parameter = self._named[name]
            parameter.mul_(1 - rate * self._decay)
            parameter.sub_(update, alpha=rate * _SCALE * max(parameter.shape) ** 0.5)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        for parameter in self._named.values():
            parameter.grad = None

    def _updates(self) -> dict[str, torch.Tensor]:
        """Muon's updates; the processes of a run share the work and exchange the results."""
        rank, world = 0, 1
        if distributed.is_initialized():
            rank, world = distributed.get_rank(), distributed.get_world_size()
        updates = {}
        for number, (name, momentum) in enumerate(self._momentum.items()):
            grad = self._named[name].grad
            assert grad is not None  # every batch has pictures and text
            momentum.mul_(_MOMENTUM).add_(grad)
            mine = number % world == rank
            look_ahead = grad + _MOMENTUM * momentum
            updates[name] = orthogonal(look_ahead) if mine else torch.zeros_like(grad)
        if world > 1:
            _sum_over_processes(list(updates.values()))
        return updates

    def state(self) -> dict[str, torch.Tensor]:
        """By "first." or "second." and the parameter's name."""
        out = {f"first.{n}": tensor for n, tensor in self._momentum.items()}
        for name, parameter in self._named.items():
            if name not in self._momentum:
                out[f"first.{name}"] = self._adam.state[parameter]["exp_avg"]
                out[f"second.{name}"] = self._adam.state[parameter]["exp_avg_sq"]
        return out

    def load(self, state: dict[str, torch.Tensor], steps: int) -> None:
        for name, parameter in self._named.items():
            if name in self._momentum:
                self._momentum[name].copy_(state[f"first.{name}"])
            else:
                self._adam.state[parameter] = {
                    "step": torch.tensor(float(steps)),
                    "exp_avg": state[f"first.{name}"],
                    "exp_avg_sq": state[f"second.{name}"],
                }
