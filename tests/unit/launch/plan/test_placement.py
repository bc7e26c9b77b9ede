"""Devices for workers and their ranks, and the share of each."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.options import serve_config
from triptych.apps.cli.app import app
from triptych.apps.launch.plan import memory
from triptych.apps.launch.plan.cluster import plan_cluster
from triptych.apps.launch.plan.cores import share_cores
from triptych.apps.launch.plan.devices import Gpu, Need, find_devices, place_workers, share_table
from triptych.apps.launch.plan.memory import check_memory, gpu_needs, place_on_gpus
from triptych.base.config import CPU_SHARE, CUDA_CONTEXT_BYTES, GIB, ServeConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.device_probe import probe_devices
from triptych.pd_worker.vllm import connection


def _config(*words: str, store_memory: int = 0) -> ServeConfig:
    return replace(share_cores(serve_config(*words), 2), store_memory=store_memory)


@pytest.fixture(autouse=True)
def machine_of_64_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 64 * GIB)


def test_pd_workers_of_a_machine_share_half_of_what_is_left():
    one = check_memory(_config(store_memory=GIB))
    two = check_memory(_config("--pd-workers", "2", store_memory=GIB))
    assert set(one) == {"pd-0"} and set(two) == {"pd-0", "pd-1"}
    assert 0.9 * 64 * GIB * CPU_SHARE < one["pd-0"].nbytes < 64 * GIB * CPU_SHARE + GIB
    assert sum(share.nbytes for share in two.values()) < 64 * GIB * (CPU_SHARE + 0.05)


def test_the_share_is_of_what_a_container_may_use(monkeypatch: pytest.MonkeyPatch):
    large = check_memory(_config())["pd-0"].nbytes
    monkeypatch.setattr(memory, "available_memory", lambda: 4 * GIB)
    small = check_memory(_config())["pd-0"].nbytes
    assert small < 4 * GIB < large
    monkeypatch.setattr(memory, "available_memory", lambda: GIB // 4)
    with pytest.raises(ConfigError, match="256.0 MiB are available"):
        check_memory(_config())


@pytest.mark.parametrize(
    "words", [("--kv-memory", "1GiB"), ("--device-memory", "1GiB"), ("--device", "cuda")]
)
def test_what_the_user_says_is_left_alone(words: tuple[str, ...]):
    assert check_memory(_config(*words)) == {}


def test_serve_on_gpus_gives_each_worker_its_device_and_its_share(tmp_path: Path):
    config = _config("--device", "cuda", "--pd-workers", "4", "--encoders", "2")
    gpus = [Gpu(f"cuda:{index}", 80 * GIB) for index in range(3)]
    memory = place_on_gpus(config, lambda flag: gpus)
    plan = plan_cluster(config, tmp_path, memory)
    flags = {
        name: app.commands[command[3]].make_context(name, list(command[4:])).params
        for name, command in plan.workers
    }
    assert {name: given["device"] for name, given in flags.items()} == {
        "pd-0": "cuda:0",
        "pd-1": "cuda:1",
        "pd-2": "cuda:2",
        "pd-3": "cuda:0",
        "encoder-0": "cuda:1",
        "encoder-1": "cuda:2",
    }
    for gpu in gpus:
        given = [one["device_memory"] for one in flags.values() if one["device"] == gpu.name]
        assert 0.8 * 80 * GIB < sum(given) <= 0.9 * 80 * GIB
    assert {given["kv_memory"] for name, given in flags.items() if name.startswith("pd")} == {0}


def test_a_gpu_that_cannot_hold_them_is_refused_before_anything_starts():
    config = _config("--device", "cuda", "--pd-workers", "4", "--encoders", "2", "--kv-memory", "20GiB")
    with pytest.raises(ConfigError, match="start fewer workers, or give more GPUs or a smaller --kv-memory"):
        place_on_gpus(config, lambda flag: [Gpu("cuda:0", 80 * GIB)])


def test_weights_context_and_caches_count_in_what_a_worker_needs():
    pd, encoder = gpu_needs(8 * GIB, _config("--kv-memory", "2GiB", "--device", "cuda"))
    assert pd.minimum - encoder.minimum == 2 * GIB + 256 * (1 << 20) and pd.grows and not encoder.grows
    assert encoder.minimum > 8 * GIB + CUDA_CONTEXT_BYTES


def test_serve_gives_every_rank_a_gpu_and_its_worker_the_first_one(tmp_path: Path):
    config = _config("--device", "cuda", "--tensor-parallel", "2", "--encoder-data-parallel", "2")
    memory = place_on_gpus(config, lambda flag: [Gpu(f"cuda:{index}", 80 * GIB) for index in range(4)])
    commands = dict(plan_cluster(config, tmp_path, memory).workers)
    devices = {name: words[words.index("--device") + 1] for name, words in commands.items()}
    assert sorted(devices.values()) == ["cuda:0", "cuda:2"]
    assert commands["pd-0"][commands["pd-0"].index("--tensor-parallel") + 1] == "2"
    assert commands["encoder-0"][commands["encoder-0"].index("--encoder-data-parallel") + 1] == "2"
    assert "--encoder-data-parallel" not in commands["pd-0"]


def _gpus(*gib: float) -> list[Gpu]:
    return [Gpu(f"cuda:{index}", int(size * GIB / 0.9) + 1) for index, size in enumerate(gib)]


def _needs(pd: int, encoders: int, *, decoder: int = 10, tower: int = 4) -> list[Need]:
    decoders = [Need(f"pd-{index}", decoder * GIB, grows=True) for index in range(pd)]
    return decoders + [Need(f"encoder-{index}", tower * GIB, grows=False) for index in range(encoders)]


def test_ranks_of_a_worker_get_gpus_whose_numbers_follow_one_another_and_equal_shares():
    decoders = [Need(f"pd-{index}", 10 * GIB, grows=True, ranks=2) for index in range(2)]
    tower = Need("encoder-0", 4 * GIB, grows=False)
    shares = place_workers(_gpus(40, 80, 80, 80, 80), [*decoders, tower])
    placed = {share.worker: (share.device, share.nbytes // GIB, share.ranks) for share in shares}
    assert placed == {"pd-0": ("cuda:1", 80, 2), "pd-1": ("cuda:3", 80, 2), "encoder-0": ("cuda:0", 40, 1)}
    table = share_table(_gpus(40, 80, 80, 80, 80), shares)
    assert [line.split()[0] for line in table.splitlines()] == [
        "cuda:0", "encoder-0", "cuda:1", "pd-0", "cuda:2", "pd-0", "cuda:3", "pd-1", "cuda:4", "pd-1"
    ]  # fmt: skip
    [share] = place_workers(_gpus(40, 80), decoders[:1])
    assert (share.device, share.nbytes // GIB) == ("cuda:0", 40), "both ranks have what the smaller GPU has"


def test_a_row_of_gpus_with_a_gap_is_none_and_too_few_are_refused_with_the_number():
    wanted = Need("pd-0", 10 * GIB, grows=True, ranks=2)
    gapped = [Gpu("cuda:0", 80 * GIB), Gpu("cuda:2", 80 * GIB)]
    for gpus in (gapped, _gpus(80), _gpus(80, 9, 80)):
        with pytest.raises(ConfigError, match="pd-0 needs 10.0 GiB of each of 2 GPUs in a row at least"):
            place_workers(gpus, [wanted])


def test_what_fits_nowhere_is_refused_with_a_table():
    with pytest.raises(ConfigError, match=r"encoder-\d needs 4.0 GiB of a GPU at least") as raised:
        place_workers(_gpus(40), _needs(4, 1))
    assert "cuda:0" in str(raised.value) and "pd-3" in str(raised.value)
    with pytest.raises(ConfigError, match="start fewer workers"):
        place_workers(_gpus(9, 9), _needs(1, 0))


def random_placement(seed: int) -> None:
    draw = random.Random(seed)
    gpus = _gpus(*[draw.choice([8, 24, 80]) for _ in range(draw.randrange(1, 5))])
    needs = [
        Need(f"w{index}", draw.randrange(1, 30) * GIB, draw.random() < 0.6, draw.choice([1, 1, 1, 2, 3]))
        for index in range(draw.randrange(1, 9))
    ]
    try:
        shares = place_workers(gpus, needs)
    except ConfigError:
        return
    assert [share.worker for share in shares] == [need.worker for need in needs]
    assert all(share.nbytes >= need.minimum for share, need in zip(shares, needs, strict=True))
    for gpu in gpus:
        number = int(gpu.name.removeprefix("cuda:"))
        there = [s for s in shares if 0 <= number - int(s.device.removeprefix("cuda:")) < s.ranks]
        assert sum(share.nbytes for share in there) <= gpu.usable
    assert all(share.worker in share_table(gpus, shares) for share in shares)


def test_no_device_is_given_away_twice_and_nobody_gets_less_than_it_needs() -> None:
    for seed in range(300):
        random_placement(seed)


@pytest.mark.parametrize("words", ["print('?')", "raise SystemExit(3)", "print('[1]')"])
def test_a_probe_that_fails_is_an_error_of_the_flag(words: str):
    with pytest.raises(ConfigError, match="--device cuda: the GPUs cannot be queried"):
        probe_devices("cuda", ((sys.executable, "-c", words)))


def test_the_real_probe_says_what_torch_finds():
    import torch

    if torch.cuda.is_available():
        assert [device.name for device in find_devices("cuda")][:1] == ["cuda:0"]
    else:
        with pytest.raises(ConfigError, match="finds no CUDA device"):
            find_devices("cuda")


@pytest.mark.parametrize(("engine", "elements"), [("native", 2), ("vllm", 1)])
def test_weights_in_8_bits_count_as_16_unless_vllm_computes_with_them(
    engine, elements, tmp_path, monkeypatch
):
    tensors = {"a.weight": ("F8_E4M3", [64, 64], [0, 4096]), "a.weight_scale_inv": ("F32", [1], [4096, 4100])}
    names = ("dtype", "shape", "data_offsets")
    header = json.dumps({key: dict(zip(names, one, strict=True)) for key, one in tensors.items()}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4100))
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "quantization_config": {"quant_method": "fp8"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    counted = []
    monkeypatch.setattr(connection, "vllm_program", lambda: "vllm")
    monkeypatch.setattr(memory, "gpu_needs", lambda weights, config: counted.append(weights) or [])
    given = replace(_config("--device", "cuda", "--engine", engine), model=str(tmp_path))
    place_on_gpus(given, lambda flag: [Gpu("cuda:0", 80 * GIB)])
    assert counted == [64 * 64 * elements + 4]
