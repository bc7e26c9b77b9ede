"""A quick profile of a tiny checkpoint: all stages run for real, and the file feeds the simulator."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from support.data.checkpoints import build_checkpoint
from triptych.apps.cli.app import app
from triptych.base.errors import ConfigError
from triptych_bench.simulator.costs.costs import read_profile
from triptych_bench.simulator.profile import fit, proxy
from triptych_bench.simulator.profile.fit import TERMS


@pytest.mark.timeout(300)
def test_a_quick_profile_measures_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quickest = replace(fit.QUICK, repeats=2, sample_seconds=0.05, stage_seconds=0.3)
    monkeypatch.setattr(fit, "QUICK", quickest)
    monkeypatch.setattr(proxy, "_SIDES", (64, 256))
    monkeypatch.setattr(proxy, "_TOKENS", 50)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("KMP_BLOCKTIME", "0")
    monkeypatch.setenv("GOMP_SPINCOUNT", "4000")
    path = tmp_path / "profile.json"
    model = str(build_checkpoint("qwen3_vl"))
    result = CliRunner().invoke(app, ["profile", model, "--quick", "--output", str(path)])
    assert result.exit_code == 0, result.output + repr(result.exception)
    found = json.loads(path.read_text())
    assert found["format"] == "triptych-profile/1"
    for stage, terms in TERMS.items():
        assert found["fits"][stage]["costs"].keys() == set(terms), stage
        assert found["fits"][stage]["samples"] == len(found["samples"][stage]) > len(terms), stage
        assert all(math.isfinite(sample["seconds"]) for sample in found["samples"][stage]), stage
        assert f"{stage:8}" in result.output
    assert found["machine"]["command"].startswith("triptych")
    assert found["settings"]["dtype"] == "float32" and found["settings"]["quick"]
    costs, shape = read_profile(path, "--gpu")
    assert costs.encoder.tower(1, 1024) > 0
    assert costs.pd.step_seconds(256, 4, 1000, 256 * 128) > costs.pd.step_seconds(0, 1, 10, 0) > 0
    assert costs.proxy.take(1, 100_000, 32) > 0 and 0 < costs.rpc < 1
    assert shape.patch == 8


def test_a_folder_that_is_not_there_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["profile", "--output", str(tmp_path / "none" / "x.json")])
    assert isinstance(result.exception, ConfigError) and "--output" in str(result.exception)
