"""Costs as files, and what the linear formulas add up."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from triptych.base.errors import ConfigError
from triptych.simulator.costs.costs import (
    QWEN3_VL_4B_SHAPE,
    CostModel,
    EncoderCosts,
    PDCosts,
    ProxyCosts,
    read_costs,
    read_shape,
)

COSTS = CostModel(
    "toy",
    "made up",
    EncoderCosts(1.0, 0.5, 10.0, 2.0, 0.25, 3.0, 0.125, 0.0625),
    PDCosts(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
    ProxyCosts(1.0, 2.0, 4.0, 8.0, 16.0),
    0.5,
)


def test_a_profile_holds_costs_and_the_models_sizes(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    document = {"format": "triptych-profile/1", **asdict(COSTS), "shape": asdict(QWEN3_VL_4B_SHAPE)}
    path.write_text(json.dumps(document))
    assert read_costs(path) == COSTS
    assert read_shape(path) == QWEN3_VL_4B_SHAPE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "holds no cost model"),
        ("[1]", "holds no cost model"),
        ('{"name": "x"}', "missing required field"),
        ('{"name": 1}', "name"),
    ],
)
def test_what_is_no_cost_model_is_refused_with_the_way_to_get_one(tmp_path, text, said):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"costs\.json") as caught:
        read_costs(path)
    assert said in str(caught.value) and "triptych profile" in str(caught.value)


def test_a_tower_batch_costs_its_call_items_patches_and_pairs_within_each_item() -> None:
    # 10 + 2 x 2 + 100 / 4 + 2 x 50² / 16
    assert COSTS.encoder.tower(2, 100) == 10 + 4 + 25 + 2 * 50**2 / 16
    assert COSTS.encoder.tower(0, 0) == 0


def test_a_step_costs_all_of_its_terms() -> None:
    assert COSTS.pd.step_seconds(3, 5, 7, 11.0) == 1 + 6 + 20 + 56 + 176
