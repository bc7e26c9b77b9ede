"""Workers over GPUs: spread, in shares, and refused where there is no room. No GPU is needed."""

from __future__ import annotations

import random
import sys

import pytest

from triptych.apps.launch.plan.devices import Gpu, Need, find_devices, place_workers, share_table
from triptych.base.config import GIB
from triptych.base.errors import ConfigError


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


@pytest.mark.parametrize("seed", range(300))
def test_no_device_is_given_away_twice_and_nobody_gets_less_than_it_needs(seed: int):
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
    assert all(share.nbytes >= need.least for share, need in zip(shares, needs, strict=True))
    for gpu in gpus:
        number = int(gpu.name.removeprefix("cuda:"))
        there = [s for s in shares if 0 <= number - int(s.device.removeprefix("cuda:")) < s.ranks]
        assert sum(share.nbytes for share in there) <= gpu.usable
    assert all(share.worker in share_table(gpus, shares) for share in shares)


def _saying(words: str) -> tuple[str, ...]:
    return (sys.executable, "-c", words)


@pytest.mark.parametrize("words", ["print('?')", "raise SystemExit(3)", "print('[1]')"])
def test_a_probe_that_fails_is_an_error_of_the_flag(words: str):
    with pytest.raises(ConfigError, match="--device cuda: the GPUs cannot be queried"):
        find_devices("cuda", _saying(words))


def test_the_real_probe_says_what_torch_finds():
    import torch

    if torch.cuda.is_available():
        assert [device.name for device in find_devices("cuda")][:1] == ["cuda:0"]
    else:
        with pytest.raises(ConfigError, match="finds no CUDA device"):
            find_devices("cuda")
