"""The machine's speed between windows, by stages of a profile that are measured again: a second each time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from triptych.config import PDConfig
from triptych.errors import ConfigError
from triptych.models.base import EncoderSide, PreparedItem
from triptych.models.registry import load_decoder, load_encoder, resolve_device, resolve_dtype
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.frontend.prompt import open_checkpoint
from triptych.simulator.costs.speed import Speed
from triptych.simulator.profile.fit import Fit, Sample
from triptych.simulator.profile.profile_encoder import distinct_pictures, tower_sample
from triptych.simulator.profile.profile_pd import alone, model_len, scenarios, smallest, step_bench
from triptych.simulator.profile.timing import Effort

#: Sides of the pictures; a tower's fit may be off by more than a machine changes, so samples are compared.
_SIDES = (128, 224, 320)
_EFFORT = Effort(repeats=5, sample_seconds=0.4, stage_seconds=1.0, live_seconds=0.0)


class _Settings(msgspec.Struct):
    dtype: str
    encoder_threads: int
    pd_threads: int


class _Fits(msgspec.Struct):
    step: Fit


class _Samples(msgspec.Struct):
    tower: list[Sample]


class _Measured(msgspec.Struct):
    """What of a file of `triptych profile` can be measured again."""

    settings: _Settings
    fits: _Fits
    samples: _Samples


@contextmanager
def speed_gauge(model: Path, profile: Path) -> Iterator[Callable[[], Speed]]:
    """Yields what measures the speed of this machine now, next to the `profile` that was taken of `model` on
    it. ConfigError for one of the two that cannot be read.
    """
    measured = _read(profile)
    threads, settings = torch.get_num_threads(), measured.settings
    # That of a cluster without --device.
    on = resolve_device("cpu")
    dtype = resolve_dtype(model, on, settings.dtype)
    encoder = load_encoder(model, device=on, dtype=dtype)
    decoder = load_decoder(model, device=on, dtype=dtype, attn_implementation=ATTENTION_NAME)
    _, tokenizer = open_checkpoint(model, decoder, model_len(decoder))
    served = PDConfig(model=str(model))
    grid = smallest(scenarios(served, model_len(decoder)))
    towers = _same_towers(encoder, measured.samples.tower)
    if not towers:
        raise ConfigError(
            f"--profile {profile} has no tower of pictures of {_SIDES} pixels: is it of {model}?"
        )

    def gauge() -> Speed:
        torch.set_num_threads(settings.pd_threads)
        steps = alone(bench, grid, measured.fits.step)
        torch.set_num_threads(settings.encoder_threads)
        return Speed(steps, _median_ratio(encoder, towers))

    try:
        with step_bench(model, served, decoder, tokenizer, grid) as bench:
            yield gauge
    finally:
        torch.set_num_threads(threads)


def _same_towers(encoder: EncoderSide, before: Sequence[Sample]) -> list[tuple[PreparedItem, float]]:
    """The pictures that the profile has alone in a batch, with the seconds that they took then."""
    seconds = {one.terms["tower_patch"]: one.seconds for one in before if one.terms["tower_item"] == 1}
    pictures = distinct_pictures(encoder, _SIDES)
    return [(picture, seconds[picture.cost]) for picture in pictures if picture.cost in seconds]


def _median_ratio(encoder: EncoderSide, towers: Sequence[tuple[PreparedItem, float]]) -> float:
    return statistics.median(
        tower_sample(encoder, picture, 1, _EFFORT).seconds / before for picture, before in towers
    )


def _read(profile: Path) -> _Measured:
    try:
        return msgspec.json.decode(profile.read_bytes(), type=_Measured)
    except OSError as error:
        raise ConfigError(f"--profile {profile}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--profile {profile} is not of `triptych profile` ({error})") from None
