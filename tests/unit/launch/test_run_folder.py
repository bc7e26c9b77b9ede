"""The run folder, the model and the greeting of `serve`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.options import assert_refused, serve_config, triptych
from triptych.apps.launch.children import backoff
from triptych.apps.launch.cluster_state import run_folder
from triptych.apps.launch.greeting import first_request, greeting
from triptych.apps.launch.model_path import (
    AUDIO_DEMO_MODEL,
    DEMO_MODEL,
    model_name,
    resolve_demo,
    resolve_model,
)
from triptych.base.errors import ConfigError


def test_a_folder_of_a_running_cluster_is_refused_and_free_after_its_end(tmp_path: Path) -> None:
    wanted = str(tmp_path / "run")
    with run_folder(wanted) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(ConfigError, match=r"--run-dir .*/run is in use by another"), run_folder(wanted):
            pass
    with run_folder(wanted) as again:
        assert again == folder


def test_a_folder_of_a_cluster_that_was_killed_is_free(tmp_path: Path) -> None:
    held = f"from triptych.apps.launch.cluster_state import run_folder\nwith run_folder({str(tmp_path)!r}):\n"
    program = [sys.executable, "-c", held + "    print(flush=True); input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ConfigError, match="in use"), run_folder(str(tmp_path)):
            pass
        other.kill()
        other.wait()
        with run_folder(str(tmp_path)) as folder:
            assert folder == tmp_path


def test_a_new_folder_goes_at_the_end_and_a_named_one_stays(tmp_path: Path) -> None:
    with run_folder("") as new:
        assert new.is_dir()
    assert not new.exists()
    with run_folder(str(tmp_path)) as named:
        pass
    assert named.is_dir()


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wanted = str(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="--run-dir .* cannot be used"), run_folder(wanted):
        pass


def test_restarts_wait_longer_each_time_up_to_a_bound():
    assert [backoff(n) for n in range(7)] == [0, 0.5, 1, 2, 4, 8, 10]


def test_without_a_model_the_demo_model_is_served_by_its_name():
    assert resolve_model("") == DEMO_MODEL
    assert model_name(DEMO_MODEL) == "demo"


def test_the_audio_demo_is_served_by_its_name_and_not_beside_a_model():
    assert resolve_model(resolve_demo("audio", "")) == AUDIO_DEMO_MODEL
    assert model_name(AUDIO_DEMO_MODEL) == "demo-audio"
    assert resolve_model(resolve_demo("images", "")) == DEMO_MODEL
    assert_refused(triptych("serve", "/folder", "--demo", "audio"), "--demo audio", "MODEL=/folder", "leave")


URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("whisper", "triptych transcribe "),
        ("bart", '"prompt": '),
        ("mbart", '"prompt": '),
        ("t5", '"prompt": '),
        ("trocr", '"multi_modal_data": {"image": '),
        ("qwen3_vl", "triptych ask "),
    ],
)
def test_the_line_to_paste_is_one_that_the_model_can_answer(family: str, words: str) -> None:
    line = first_request(build_checkpoint(family), "triptych", URL)
    assert words in line and URL in line
    if line.startswith("curl"):
        assert json.loads(line.partition("-d '")[2].removesuffix("'"))


def test_a_model_that_hears_is_asked_about_a_sound(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_asr"}')
    assert "--audio /path/to/clip.wav" in first_request(tmp_path, "triptych", URL)


def test_a_cluster_with_tls_is_named_by_https_and_its_ca_is_mentioned(tmp_path: Path) -> None:
    files = ("--http-cert-file", str(tmp_path / "cert.pem"), "--http-key-file", str(tmp_path / "key.pem"))
    plain, secured = (greeting(serve_config(str(DEMO_MODEL), *words)) for words in ((), files))
    assert "http://127.0.0.1:8000" in plain and "--ca-file" not in plain
    assert "https://127.0.0.1:8000" in secured and "http://" not in secured and "--ca-file" in secured
