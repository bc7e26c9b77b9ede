"""What a person typed is hidden from others; what is handed down is seen by its receiver only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from triptych.apps.launch.secrets import VARIABLE, hand_down

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
