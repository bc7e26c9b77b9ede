"""`triptych plan`: a file of costs in, tables, a document and a picture out; bad input told by flag."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from support.data.checkpoints import build_checkpoint
from support.simulated import COSTS, MODEL
from triptych.apps.cli.app import app
from triptych.base.errors import ConfigError
from triptych_bench.simulator.costs.model_config import read_model
from triptych_bench.simulator.plan.question import read_device

QUICK = (
    "--workload",
    "image",
    "--devices",
    "2",
    "--quick",
    "--output-tokens",
    "8",
    "--image-size",
    "640x640",
)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """As `triptych profile` writes its costs."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(COSTS) | {"shape": asdict(MODEL)}))
    return path


def plan(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, words)], terminal_width=200)


@pytest.mark.slow
def test_a_plan_is_shown_written_and_drawn(profile: Path, tmp_path: Path) -> None:
    document, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    files = ("--json", document, "--plot", picture)
    result = plan(*QUICK, "--gpu", profile, "--scale", "--rate", "30", "--price", "3.6", *files)
    assert result.exit_code == 0, result.output
    told = json.loads(document.read_text())
    assert told["best"] == "1E1PD" and told["replicas"]["shape"] == "2 colocated"
    assert told["device"]["dollars_per_hour"] == 3.6 and told["device"]["source"] == "made up"
    rate = told["ratios"][0]["rate"]
    assert told["ratios"][0]["dollars_per_million"] == pytest.approx(2 * 3.6 / 3600 / rate * 1e6)
    assert [one["rate"] for one in told["purchases"]] == [30, 30]
    assert all(one["confirmed"] for one in told["purchases"])
    assert told["scaling"]["curve"][-1]["workers"] == 1000
    assert told["sensitivity"] == []
    assert {one["part"] for one in told["scaling"]["bottlenecks"]} == {"proxy", "store", "registry"}
    for words in ("1E1PD", "2 colocated", "per million", "one proxy's CPU", "For 30 requests/s"):
        assert words in result.stdout
    assert result.stderr.splitlines()[0] == "simulating"
    assert "simulating" not in result.stdout
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "tpu"), "--gpu"),
        (("--gpu", "a100", "--workload", "nothing"), "--workload"),
        (("--gpu", "a100", "--slo", "itl:1"), "--slo"),
        (("--gpu", "a100", "--devices", "1"), "--devices"),
        (("--gpu", "a100", "--devices", "65"), "--devices"),
        (("--gpu", "a100", "--devices", "4", "--pd-ranks", "4"), "--devices"),
        (("--gpu", "a100", "--pd-ranks", "9"), "--pd-ranks"),
        (("--gpu", "a100", "--pd-ranks", "2", "--pd-rank-speed", "3"), "--pd-rank-speed"),
        (("--gpu", "a100", "--pd-rank-speed", "1.5"), "--pd-rank-speed"),
        (("--gpu", "a100", "--pd-ranks", "2", "--scale"), "--scale"),
        (("--gpu", "a100", "--rate", "-1"), "--rate"),
        (("--gpu", "a100", "--price", "-1"), "--price"),
        (("--gpu", "a100", "--repeats", "0"), "--repeats"),
        (("--gpu", "a100", "--store-bandwidth", "-1"), "--store-bandwidth"),
        (("--gpu", "a100", "--store-bandwidth", "5"), "--store-bandwidth is asked for by --scale alone"),
        (("--gpu", "a100", "--price", "2", "--budget", "9", "--devices", "8"), "--budget is in place of"),
        (("--gpu", "a100", "--quick", "--repeats", "9"), "--quick tries one load"),
        (("--gpu", "a100", "--image-reuse", "1"), "--image-reuse"),
        (("--gpu", "a100", "--plot", "plan.gif"), "--plot"),
        (("--gpu", "a100", "--model", "/nowhere"), "--model"),
        (("--gpu", "a100", "--json", "/nowhere/at/all/plan.json"), "--json"),
    ],
)
def test_an_impossible_plan_is_an_error_that_names_the_flag(words: tuple[str, ...], said: str) -> None:
    result = plan(*words)
    assert isinstance(result.exception, ConfigError | SystemExit)
    assert said in f"{result.exception} {result.stderr}"


def test_a_profile_with_a_negative_cost_is_refused(profile: Path) -> None:
    found = json.loads(profile.read_text())
    profile.write_text(json.dumps(found | {"rpc": -1.0}))
    assert "--gpu" in str(plan("--gpu", profile).exception)


def test_a_model_goes_with_named_devices_alone_and_must_fit_one(profile: Path, tmp_path: Path) -> None:
    path = build_checkpoint("llava")
    assert "--model goes with named devices" in str(plan("--gpu", profile, "--model", path).exception)
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= {"hidden_size": 8192, "num_hidden_layers": 200, "intermediate_size": 65536}
    large = tmp_path / "config.json"
    large.write_text(json.dumps(config))
    told = str(plan("--gpu", "l4", "--model", large).exception)
    assert "llava has " in told and "too much for 1 x L4 of 24 GB: raise --pd-ranks" in told


def test_a_device_names_the_model_it_is_for_and_its_only_size_of_a_picture() -> None:
    device = read_device("l4", served=read_model(build_checkpoint("llava")))
    assert device.name == "L4 with llava"
    assert "every picture is one tile of " in device.costs.source
