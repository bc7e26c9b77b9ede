"""The command line: what cannot work ends in one sentence and exit code 2."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from click.testing import CliRunner

from triptych import __version__
from triptych.cli.app import app
from triptych.cli.commands.serve import internal_token, plan_cluster
from triptych.cli.commands.tones import write_tones
from triptych.cli.credentials import store_of
from triptych.cli.options import arguments, build, secrets_of
from triptych.config import EncoderConfig, PDConfig, ProxyConfig, flags_of, read_internal_token
from triptych.ec_connector.store.address import StoreAddress, parse_store_url
from triptych.errors import ConfigError
from triptych.launch.children import backoff
from triptych.launch.model_path import (
    AUDIO_DEMO_MODEL,
    DEMO_MODEL,
    model_name,
    resolve_demo,
    resolve_model,
)
from triptych.launch.plan.cores import share_cores
from triptych.launch.plan.memory import MemoryPlan, check_fits, weight_bytes


def _triptych(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "triptych.cli", *words],
        text=True,
        capture_output=True,
        timeout=50,
        check=False,
    )


def _assert_told(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr


def test_version_is_told():
    assert _triptych("--version").stdout == f"triptych {__version__}\n"


@pytest.mark.parametrize("command", ["serve", "proxy", "encoder", "pd", "check"])
def test_every_flag_of_a_service_is_in_its_help_with_its_variable(command):
    config = {"proxy": ProxyConfig, "encoder": EncoderConfig, "pd": PDConfig}.get(command)
    text = CliRunner().invoke(app, [command, "--help"]).output
    for name, _, _ in flags_of(config) if config else []:
        assert f"--{name.replace('_', '-')}" in text or f"--no-{name.replace('_', '-')}" in text
        assert f"TRIPTYCH_{name.upper()}" in text.replace("\n", " ").replace(" " * 34, "")


@pytest.mark.parametrize("config", [ProxyConfig, EncoderConfig, PDConfig])
def test_a_config_survives_the_way_through_a_command_line(config):
    values = {name: default for name, default, _ in flags_of(config)} | {"prefix_caching": False}
    words = arguments(config, values)
    command = {ProxyConfig: "proxy", EncoderConfig: "encoder", PDConfig: "pd"}[config]
    context = app.commands[command].make_context(command, list(words))
    assert build(config, context.params) == build(config, values)


def test_a_missing_model_folder_is_told():
    _assert_told(
        _triptych("serve", "/no/such/folder"), "MODEL=/no/such/folder does not exist", "MODEL=/folder"
    )


def test_a_folder_without_a_config_is_told(tmp_path):
    _assert_told(_triptych("serve", str(tmp_path)), "config.json", "safetensors")


def test_a_hub_id_that_cannot_be_fetched_is_told(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _assert_told(_triptych("serve", "nobody/nothing"), "nobody/nothing", "MODEL=/folder")


def test_a_taken_port_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _assert_told(
            _triptych("serve", str(DEMO_MODEL), "--port", str(port)), f"--port {port}", "picks another"
        )


def test_a_service_alone_needs_a_store():
    _assert_told(_triptych("proxy"), "--store")
    _assert_told(_triptych("encoder"), "--store")


def test_a_worker_open_to_the_network_needs_a_token_and_an_address():
    store = ("--store", "redis://127.0.0.1:1/0")
    _assert_told(_triptych("pd", *store, "--host", "0.0.0.0"), "--internal-token")
    _assert_told(_triptych("pd", *store, "--host", "0.0.0.0", "--internal-token", "x" * 16), "--advertise")
    _assert_told(_triptych("pd", *store, "--advertise", "0.0.0.0:5"), "--advertise")


def test_memory_that_does_not_fit_is_told_with_the_sum():
    result = _triptych("serve", str(DEMO_MODEL), "--kv-memory", "900TiB", "--port", "0", "--grpc-port", "0")
    _assert_told(result, "needs", "are available", "--kv-memory", "together")


@pytest.mark.parametrize("command", ["serve", "check"])
@pytest.mark.parametrize("flag", ["--tensor-parallel", "--pipeline-parallel"])
def test_weights_shared_by_workers_are_refused_by_one_error(command: str, flag: str):
    _assert_told(_triptych(command, str(DEMO_MODEL), flag, "2"), "cannot be served", f"give {flag} 1")


def test_a_plan_that_fits_is_accepted():
    check_fits(MemoryPlan((("a", 1), ("b", 2))), 3)
    with pytest.raises(ConfigError, match="needs 3 B"):
        check_fits(MemoryPlan((("a", 1), ("b", 2))), 2)


def test_a_broken_weight_file_is_told(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="fetch the checkpoint again"):
        weight_bytes(tmp_path, "float32")


def test_restarts_wait_longer_each_time_up_to_a_bound():
    assert [backoff(n) for n in range(7)] == [0, 0.5, 1, 2, 4, 8, 10]


def test_without_a_model_the_demo_model_is_served_by_its_name():
    assert resolve_model("") == DEMO_MODEL
    assert model_name(DEMO_MODEL) == "demo"


def test_the_audio_demo_is_served_by_its_name_and_not_beside_a_model():
    assert resolve_model(resolve_demo("audio", "")) == AUDIO_DEMO_MODEL
    assert model_name(AUDIO_DEMO_MODEL) == "demo-audio"
    assert resolve_model(resolve_demo("images", "")) == DEMO_MODEL
    _assert_told(_triptych("serve", "/folder", "--demo", "audio"), "--demo audio", "MODEL=/folder", "leave")


def test_tones_are_written_to_a_file(tmp_path):
    made = _triptych("tones", "5551234", "-o", str(tmp_path / "tones.wav"))
    assert (made.returncode, made.stderr) == (0, "")
    assert soundfile.info(tmp_path / "tones.wav").duration == pytest.approx(2.45, abs=0.01)


@pytest.mark.parametrize("digits", ["", "12a", "123456789", "١٢٣"])
def test_tones_of_what_is_not_dialled_are_refused(tmp_path, digits):
    with pytest.raises(ConfigError, match="DIGITS=.* 1 to 8 digits"):
        write_tones(digits, tmp_path / "x.wav")
    assert not list(tmp_path.iterdir())


def test_tones_for_a_folder_that_is_not_there_are_told(tmp_path):
    with pytest.raises(ConfigError, match="--output .*name a file that can be written"):
        write_tones("12", tmp_path / "no" / "x.wav")


def test_nobody_at_the_url_is_told():
    result = _triptych("ask", "What?", "--url", "http://127.0.0.1:9")
    assert result.returncode == 1
    assert "triptych serve" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_front_door_open_to_the_network_needs_keys_or_a_word_that_it_does_not(tmp_path):
    store = ("--store", "redis://127.0.0.1:1/0", "--host", "0.0.0.0")
    _assert_told(_triptych("proxy", *store), "--api-key-file", "--no-auth", "127.0.0.1")
    _assert_told(_triptych("serve", str(DEMO_MODEL), "--host", "0.0.0.0"), "--api-key-file", "--no-auth")
    missing = tmp_path / "keys"
    _assert_told(
        _triptych("proxy", *store, "--api-key-file", str(missing)), "--api-key-file", "cannot be read"
    )


def test_a_made_key_goes_to_the_file_and_is_shown_beside_it():
    made = _triptych("key", "alice")
    assert re.fullmatch(r"alice sha256:[0-9a-f]{64}\n", made.stdout)
    assert re.search(r"tk-[A-Za-z0-9_-]{43}\n", made.stderr)
    _assert_told(_triptych("key", "al ice"), "no name")


def test_secrets_reach_children_beside_their_command_line():
    values = {
        "internal_token": "hush-1-0123456789",
        "api_key": "hush-2,hush-3",
        "store": "unix://:hush-4@/x",
        "host": "127.0.0.1",
    }
    assert not any("hush" in word for word in arguments(ProxyConfig, values))
    assert secrets_of(ProxyConfig, values) == {
        "TRIPTYCH_STORE": "unix://:hush-4@/x",
        "TRIPTYCH_INTERNAL_TOKEN": "hush-1-0123456789",
        "TRIPTYCH_API_KEY": "hush-2,hush-3",
    }
    environment = CliRunner(env=secrets_of(ProxyConfig, values))
    with environment.isolation():
        context = app.commands["proxy"].make_context("proxy", [])
    config = build(ProxyConfig, context.params)
    assert (config.internal_token, config.api_key) == ("hush-1-0123456789", "hush-2,hush-3")
    assert config.store == "unix://:hush-4@/x"
    assert "hush" not in repr(config)


def test_keys_may_be_given_one_by_one():
    context = app.commands["proxy"].make_context("proxy", ["--api-key", "a", "--api-key", "b,c"])
    assert build(ProxyConfig, context.params).api_key == "a,b,c"


def test_the_cluster_makes_up_a_token_of_its_own_and_keeps_client_keys_from_the_workers(tmp_path):
    context = app.commands["serve"].make_context("serve", ["--api-key", "k" * 16])
    plans = []
    for _ in range(2):
        values = context.params | {"internal_token": internal_token(context.params)}
        plans.append(plan_cluster(DEMO_MODEL, "demo", values, tmp_path, 1 << 20))
    first, second = (plan.worker_secrets["TRIPTYCH_INTERNAL_TOKEN"] for plan in plans)
    assert len(first) >= 32
    assert first != second
    store = f"unix://{tmp_path}/store.sock"
    assert plans[0].proxy_secrets == {
        "TRIPTYCH_STORE": store,
        "TRIPTYCH_INTERNAL_TOKEN": first,
        "TRIPTYCH_API_KEY": "k" * 16,
    }
    assert plans[0].worker_secrets["TRIPTYCH_STORE"] == store
    assert first not in repr(plans[0])
    assert plans[0].worker_secrets["TRIPTYCH_API_KEY"] == ""


@pytest.mark.parametrize(("replicas", "connector"), [(1, "memory"), (2, "redis")])
def test_a_replica_alone_keeps_its_embeddings_and_several_share_them(tmp_path, replicas, connector):
    words = ["--topology", "colocated", "--replicas", str(replicas), "--encoder-batch-patches", "7"]
    values = app.commands["serve"].make_context("serve", words).params
    plan = plan_cluster(DEMO_MODEL, "demo", share_cores(values, 2), tmp_path, 1 << 20)
    assert [name for name, _ in plan.workers] == [f"colocated-{index}" for index in range(replicas)]
    assert plan.pools == {"encoder": replicas, "pd": replicas}
    command = plan.workers[0][1]
    assert command[3] == "colocated"
    given = app.commands["colocated"].make_context("colocated", list(command[4:])).params
    assert (given["connector"], given["store_memory"]) == (connector, 1 << 20)
    assert (given["encoder_batch_patches"], given["served_model_name"]) == (7, "demo")


def _planned(tmp_path, *words: str) -> dict[str, dict[str, object]]:
    """The parsed flags of each worker that `triptych serve` with these words would start."""
    values = app.commands["serve"].make_context("serve", list(words)).params
    plan = plan_cluster(DEMO_MODEL, "demo", share_cores(values, 2), tmp_path, 1 << 20)
    return {
        name: app.commands[command[3]].make_context(name, list(command[4:])).params
        for name, command in plan.workers
    }


def test_pinned_workers_get_cores_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    workers = _planned(tmp_path, "--cpus-per-worker", "2")
    assert {name: flags["cpus"] for name, flags in workers.items()} == {"pd-0": "0,1", "encoder-0": "2,3"}
    workers = _planned(tmp_path, "--cpus-per-worker", "1", "--topology", "colocated", "--replicas", "2")
    assert [flags["cpus"] for flags in workers.values()] == ["0", "1"]


def test_paced_workers_have_a_slot_each_in_one_core_page(tmp_path):
    words = ("--encoders", "2", "--encoder-threads", "2", "--threads", "1")
    workers = _planned(tmp_path, "--cpu-sharing", "pace", *words)
    assert [workers[f"encoder-{index}"]["threads"] for index in (0, 1)] == [2, 2]
    assert workers["pd-0"]["threads"] == 1
    assert {name: flags["core_slot"] for name, flags in workers.items()} == {
        "pd-0": 0,
        "encoder-0": 1,
        "encoder-1": 2,
    }
    assert {flags["core_page"] for flags in workers.values()} == {str(tmp_path / "cores")}


def test_without_a_word_towers_take_every_core_and_decode_steps_are_paced(tmp_path):
    workers = _planned(tmp_path)
    assert list(workers) == ["pd-0", "encoder-0", "encoder-1"]
    towers = [workers["encoder-0"], workers["encoder-1"]]
    assert [flags["threads"] for flags in towers] == [1, 1]
    assert workers["pd-0"]["step_interval"] > 0 and workers["pd-0"]["keep_core"]
    assert {flags["core_page"] for flags in workers.values()} == {str(tmp_path / "cores")}
    alone = _planned(tmp_path, "--cpu-sharing", "free")
    assert list(alone) == ["pd-0", "encoder-0"]
    assert (alone["pd-0"]["step_interval"], alone["encoder-0"]["core_page"]) == (0.0, "")
    assert not alone["pd-0"]["keep_core"]


@pytest.mark.parametrize(("words", "cpus"), [((), "0,1"), (("--cpu-sharing", "free"), "")])
def test_the_proxy_keeps_off_the_core_that_a_paced_pd_worker_keeps_to(tmp_path, monkeypatch, words, cpus):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    values = app.commands["serve"].make_context("serve", list(words)).params
    plan = plan_cluster(DEMO_MODEL, "demo", share_cores(values, 3), tmp_path, 1 << 20)
    assert app.commands["proxy"].make_context("proxy", list(plan.proxy[4:])).params["cpus"] == cpus


def test_the_token_may_come_from_a_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("hush-0123456789a\n")
    assert read_internal_token("", str(path)) == "hush-0123456789a"
    with pytest.raises(ConfigError, match="both set"):
        read_internal_token("x", str(path))
    path.write_text("\n")
    with pytest.raises(ConfigError, match="one line"):
        read_internal_token("", str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_internal_token("", str(tmp_path / "none"))
    path.write_text("hush-012345678\n")
    for given in (("hush", ""), ("", str(path))):
        with pytest.raises(ConfigError, match="16 characters") as caught:
            read_internal_token(*given)
        assert "hush" not in str(caught.value)


def _store(store: str, file: Path | str = "") -> str:
    return store_of({"store": store, "store_password_file": str(file)})


def test_the_stores_password_may_come_from_a_file(tmp_path):
    path = tmp_path / "password"
    path.write_text("p@ss/w:rd #1\n")
    assert parse_store_url(_store("redis://bob@h:7000/1", path)).password == "p@ss/w:rd #1"
    assert parse_store_url(_store("unix:///run/s.sock?db=2", path)) == StoreAddress(
        path="/run/s.sock", db=2, password="p@ss/w:rd #1"
    )
    assert parse_store_url(_store("redis://bob@h:7000/1", path)).username == "bob"
    assert _store("redis://h") == "redis://h"


@pytest.mark.parametrize(
    ("store", "content", "named"),
    [
        ("redis://:old-secret@h", "hush", "leave one of them out"),
        ("auto", "hush", "--store"),
        ("", "hush", "--store"),
        ("http://h", "hush", "--store"),
        ("redis://h", "\n", "one line"),
        ("redis://h", "hush\nhush", "one line"),
        ("redis://h", None, "cannot be read"),
    ],
)
def test_a_password_file_that_cannot_be_used_is_named_with_the_remedy(tmp_path, store, content, named):
    path = tmp_path / "password"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=named) as caught:
        _store(store, path)
    assert not re.search("hush|secret", str(caught.value))


@pytest.mark.parametrize(
    ("flags", "patches"),
    [({}, 512), ({"device": "cuda:1"}, 16384), ({"encoder_batch_patches": 7}, 7)],
)
def test_encoder_batches_are_small_where_a_picture_keeps_the_device_busy(flags, patches):
    assert EncoderConfig(**flags).batch_patches == patches
