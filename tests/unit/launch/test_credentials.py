"""Secrets of processes: files that hold them, and what nobody sees."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.processes.authority import Authority
from triptych.apps.launch.secrets import VARIABLE, hand_down, store_url, without_store_files
from triptych.base.config import ServiceConfig
from triptych.base.config.flags import config_from
from triptych.base.errors import ConfigError
from triptych.store.sockets import StoreAddress, parse_store_url
from triptych.store.tls import StoreTls


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
