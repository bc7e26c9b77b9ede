"""The GPUs that a vLLM of the worker's own sees, beside what `serve` plans, and those that are taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.options import serve_config
from triptych.apps.launch.plan import memory
from triptych.apps.launch.plan.cores import share_cores
from triptych.apps.launch.plan.devices import Gpu
from triptych.base.config import CUDA_CONTEXT_BYTES, GIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.device_probe import ProbedGpu
from triptych.pd_worker.vllm.gpus import devices_of, held_elsewhere, visible_devices


def seen(device: str, ranks: int, given: str | None) -> str | None:
    config = PDConfig(device=device, tensor_parallel=ranks)
    return visible_devices(config, given).get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("device", "ranks", "given", "expected"),
    [
        ("cpu", 1, "0,1", None),
        ("cuda", 1, None, "0"),
        ("cuda", 2, "3,1", "3,1"),
        ("cuda:2", 1, None, "2"),
        ("cuda:2", 2, None, "2,3"),
        ("cuda:2", 2, "4,5,6,7", "6,7"),
        ("cuda:0", 4, "4,5,6,7", "4,5,6,7"),
        ("cuda:1", 2, "GPU-a, MIG-b ,GPU-c", "MIG-b,GPU-c"),
    ],
)
def test_as_many_gpus_as_it_has_ranks_are_seen_from_its_device_on(device, ranks, given, expected):
    assert seen(device, ranks, given) == expected


@pytest.mark.parametrize(("device", "given"), [("cuda:3", "4,5,6,7"), ("cuda:4", "4,5,6,7"), ("cuda", "")])
def test_a_list_with_too_few_gpus_is_refused_by_name(device: str, given: str) -> None:
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES={given} has"):
        seen(device, 2, given)


def test_workers_of_serve_have_every_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 64 * GIB)
    words = ("--device", "cuda", "--tensor-parallel", "2", "--pd-workers", "3", "--encoders", "1")
    config = replace(share_cores(serve_config(*words), 8), store_memory=GIB)
    gpus = [Gpu(f"cuda:{index}", 80 * GIB) for index in range(6)]
    shares = memory.place_on_gpus(config, lambda flag: gpus)
    lists = [
        seen(share.device, share.ranks, "10,11,12,13,14,15")
        for name, share in shares.items()
        if name.startswith("pd")
    ]
    assert sorted(",".join(map(str, lists)).split(",")) == ["10", "11", "12", "13", "14", "15"]


def test_a_gpu_is_taken_where_more_is_gone_than_the_look_itself_takes() -> None:
    def held(free: int, *others: int) -> str:
        gpus = [ProbedGpu(f"cuda:{index}", each, 24 * GIB) for index, each in enumerate((free, *others))]
        return held_elsewhere(devices_of(PDConfig(device="cuda", tensor_parallel=2)), gpus)

    idle = 24 * GIB - CUDA_CONTEXT_BYTES
    assert held(idle, idle) == ""
    assert "cuda:1" in held(idle, 20 * GIB)
    assert "cuda:0" in held(24 * GIB - 2 * CUDA_CONTEXT_BYTES - 1, idle)
    assert held(idle, idle, 0) == "", "it is not one of the worker's"
