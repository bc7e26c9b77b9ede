from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.base.hashing import stored_as
from triptych.base.types import INT8, WorkerInfo
from triptych.registry.matching import MISMATCHES, Mismatch, PDModels, described

KEY, OTHER = "a" * 64, "c" * 64
PD = WorkerInfo("10.0.0.1:1", "pd", "i", KEY, "qwen", capacity={"row_width": 8192})
ENCODER = WorkerInfo(
    "10.0.0.2:1", "encoder", "i", KEY, "qwen", namespaces=("b" * 64,), capacity={"row_width": 8192}
)


def mismatch(encoder: WorkerInfo, *pd_workers: WorkerInfo) -> Mismatch:
    found = PDModels.of(pd_workers).mismatch(encoder)
    assert found.reason in MISMATCHES
    return found


def test_an_encoder_of_a_pd_workers_key_fits() -> None:
    assert PDModels.of([ENCODER, PD]).mismatch(ENCODER) is None


TOWER = "d" * 32


def test_an_encoder_of_another_checkpoint_with_the_same_tower_fits() -> None:
    """The halves of a namespace behind the tower's are of what prepares items: they may differ."""
    encoder = replace(ENCODER, model="base", model_key=OTHER, namespaces=(TOWER + "e" * 32,))
    models = PDModels.of([replace(PD, namespaces=(TOWER + "f" * 32,))])
    assert models.mismatch(encoder) is None
    assert models.mismatch(replace(encoder, namespaces=("e" * 64,))).reason == "model"
    assert models.mismatch(replace(encoder, capacity={"row_width": 4096})).reason == "row_width"


def test_a_pd_worker_of_an_earlier_release_names_no_tower_and_takes_its_own_key_alone() -> None:
    new = replace(ENCODER, namespaces=(TOWER + "e" * 32,))
    assert PDModels.of([PD]).mismatch(new) is None
    assert mismatch(replace(new, model_key=OTHER), PD).reason == "model_key"
    assert PDModels.of([replace(PD, namespaces=(TOWER + "e" * 32,))]).mismatch(ENCODER) is None


def test_pd_workers_of_earlier_releases_get_no_rows_in_8_bits_though_their_checkpoint_is_the_same() -> None:
    tower = TOWER + "e" * 32
    int8 = replace(ENCODER, model_key=stored_as(KEY, INT8), namespaces=(stored_as(tower, INT8),))
    assert mismatch(int8, replace(PD, namespaces=(tower,))).reason == "model_key"
    now = replace(PD, namespaces=(tower, stored_as(tower, INT8)))
    assert PDModels.of([now]).mismatch(int8) is None
    assert PDModels.of([now]).mismatch(replace(ENCODER, namespaces=(tower,))) is None


def test_before_any_pd_worker_is_known_there_is_nothing_to_compare_with() -> None:
    assert PDModels.of([ENCODER]).mismatch(ENCODER) is None


def test_two_versions_live_at_once_and_each_encoder_fits_its_own() -> None:
    models = PDModels.of([PD, replace(PD, model_key=OTHER, capacity={"row_width": 4096})])
    assert models.mismatch(ENCODER) is None
    assert models.mismatch(replace(ENCODER, model_key=OTHER, capacity={"row_width": 4096})) is None


def test_an_encoder_of_another_key_of_the_same_model_is_shown_both_keys_and_the_flags() -> None:
    found = mismatch(replace(ENCODER, model_key=OTHER), PD)
    assert (found.reason, found.may_pass) == ("model_key", True)
    assert OTHER[:12] in found.text and KEY[:12] in found.text
    assert "--model-revision" in found.text and "rolling update" in found.text


def test_an_encoder_without_a_matching_pd_worker_gets_a_list_of_the_models_that_there_are() -> None:
    found = mismatch(replace(ENCODER, model="llava", model_key=OTHER), PD)
    assert (found.reason, found.may_pass) == ("model", True)
    assert "there is qwen" in found.text


def test_rows_of_another_width_do_not_fit_and_both_widths_are_named() -> None:
    found = mismatch(replace(ENCODER, capacity={"row_width": 4096}), PD)
    assert (found.reason, found.may_pass) == ("row_width", False)
    assert "4096" in found.text and "8192" in found.text


@pytest.mark.parametrize("given, taken", [({}, {"row_width": 8192}), ({"row_width": 8192}, {})])
def test_a_worker_that_names_no_width_is_of_an_older_release_and_fits(given, taken):
    assert PDModels.of([replace(PD, capacity=taken)]).mismatch(replace(ENCODER, capacity=given)) is None


def test_sounds_do_not_fit_a_model_of_pictures() -> None:
    found = mismatch(replace(ENCODER, modality="audio"), PD)
    assert (found.reason, found.may_pass) == ("modality", False)


def test_an_encoder_without_a_namespace_matches_no_pd_worker() -> None:
    assert mismatch(replace(ENCODER, namespaces=())).reason == "namespace"


def test_a_registration_of_many_lines_makes_one_short_line() -> None:
    hostile = "x\nERROR forged\x1b[31m" * 1000
    forged = replace(PD, model=hostile, model_key=hostile, modality=hostile)
    encoder = replace(ENCODER, address=hostile, model=hostile, model_key=OTHER, namespaces=(hostile,) * 1000)
    for text in (
        described(encoder),
        mismatch(encoder, forged).text,
        mismatch(replace(encoder, model="llava"), forged).text,
        mismatch(replace(encoder, model_key=hostile), forged).text,
    ):
        assert text.isprintable()
        assert len(text) < 600
