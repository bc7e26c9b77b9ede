"""The folder of a run, and the credentials in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.data.checkpoints import build_checkpoint
from support.options import assert_refused, serve_config, triptych
from support.processes.authority import Authority
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
from triptych.apps.launch.secrets import VARIABLE, hand_down, store_url, without_store_files
from triptych.base.config import ServiceConfig
from triptych.base.config.flags import config_from
from triptych.base.errors import ConfigError
from triptych.store.address import StoreAddress, parse_store_url
from triptych.store.tls import StoreTls


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


def test_an_address_of_ipv6_is_told_as_urls_have_it() -> None:
    told = greeting(serve_config(str(DEMO_MODEL), "--host", "::1"))
    assert "http://[::1]:8000" in told and "gRPC [::1]:" in told and "//::1" not in told


def _store(store: str, file: Path | str = "", **flags: str) -> str:
    return store_url(store, ServiceConfig(store_password_file=str(file), **flags))


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


def test_the_files_of_tls_are_a_part_of_the_address_that_processes_hand_on(tmp_path):
    files = Authority(tmp_path / "with space").client()
    flags = {
        "store_ca_file": files.ca_file,
        "store_cert_file": files.cert_file,
        "store_key_file": files.key_file,
    }
    password = tmp_path / "password"
    password.write_text("p@ss?#")
    url = _store("rediss://bob@h:7000/1", password, **flags)
    found = parse_store_url(url)
    assert found == StoreAddress(host="h", port=7000, db=1, username="bob", password="p@ss?#", tls=files)
    config = config_from(ServiceConfig, {"store": url, "store_password_file": str(password), **flags})
    assert without_store_files(config) == ServiceConfig(store=url)
    assert store_url(url, without_store_files(config)) == url, "a process that was handed it changes nothing"


def test_a_store_with_tls_needs_no_file_where_the_system_knows_its_ca():
    assert parse_store_url(_store("rediss://h")).tls == StoreTls()


@pytest.mark.parametrize(
    ("store", "flags", "named"),
    [
        ("redis://h", {"store_ca_file": "/ca"}, "rediss://host:port/0"),
        ("unix:///s", {"store_key_file": "/key"}, "rediss://host:port/0"),
        ("auto", {"store_ca_file": "/ca"}, "--store-ca-file is for a store of yours"),
        ("", {"store_cert_file": "/ca"}, "--store-cert-file is for a store of yours"),
        ("rediss://h", {"store_cert_file": "/cert"}, "go together"),
        ("rediss://h", {"store_key_file": "/key"}, "go together"),
        ("rediss://h?ssl_ca_certs=/ca", {"store_ca_file": "/ca"}, "leave one of them out"),
        ("rediss://h", {"store_ca_file": "/nowhere/ca"}, "--store-ca-file /nowhere/ca cannot be read"),
    ],
)
def test_files_of_tls_that_cannot_be_used_are_refused_at_the_start(store, flags, named):
    with pytest.raises(ConfigError, match=named):
        _store(store, **flags)


#: Shows what the process itself reads, what its own children inherit, and what others read of it.
_SHOW = """
import json, os, subprocess, sys
from pathlib import Path
from triptych.apps.launch.secrets import receive
from triptych.apps.launch.secrets import hide
receive()
hide({"--store", "--key"}, {"TRIPTYCH_STORE"})
seen = [Path(f"/proc/self/{name}").read_bytes().decode().split("\\0") for name in ("cmdline", "environ")]
inherited = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
own = {name: os.environ.get(name) for name in ("TRIPTYCH_STORE", "OTHER", "TRIPTYCH_SECRETS_FD")}
print(json.dumps({"argv": sys.argv[1:], "own": own, "seen": seen, "inherited": inherited}))
"""


def _shown(*words: str, descriptor: int | None = None, **variables: str) -> dict[str, Any]:
    handed = {} if descriptor is None else {VARIABLE: str(descriptor)}
    done = subprocess.run(
        [sys.executable, "-c", _SHOW, *words],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)} | variables | handed,
        pass_fds=() if descriptor is None else (descriptor,),
        capture_output=True,
        text=True,
        check=True,
    )
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


@pytest.mark.parametrize("words", [("--store", "hush-1"), ("--store=hush-1",)])
def test_a_typed_secret_is_hidden_and_still_read(words):
    shown = _shown("serve", *words, "--key", "hush-2", "--port", "8000")
    assert shown["argv"] == ["serve", *words, "--key", "hush-2", "--port", "8000"]
    line = shown["seen"][0]
    assert not any("hush" in word for word in line)
    assert line[-4:-1] == ["******", "--port", "8000"]


def test_a_secret_in_the_environment_is_hidden_and_still_read():
    shown = _shown(TRIPTYCH_STORE="hush-3", OTHER="hush-3 too")
    assert shown["own"] == {"TRIPTYCH_STORE": "hush-3", "OTHER": "hush-3 too", "TRIPTYCH_SECRETS_FD": None}
    environ = shown["seen"][1]
    assert "TRIPTYCH_STORE=******" in environ
    # Other variables are not ours to hide.
    assert "OTHER=hush-3 too" in environ


def test_what_is_handed_down_is_a_variable_of_its_receiver_that_nobody_sees():
    with hand_down({"TRIPTYCH_STORE": "hush-4"}) as descriptor:
        shown = _shown(descriptor=descriptor)
    assert shown["own"]["TRIPTYCH_STORE"] == "hush-4"
    assert shown["own"]["TRIPTYCH_SECRETS_FD"] is None
    assert not any("hush" in word for words in shown["seen"] for word in words)
    assert VARIABLE not in shown["inherited"]


def test_a_process_without_secrets_is_left_as_it_is():
    shown = _shown("serve", "--port", "8000")
    assert shown["seen"][0][-4:] == ["serve", "--port", "8000", ""]
