"""The command line: help, errors of a start, and extras that are missing."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from support.matrix import matrix
from support.options import assert_refused, triptych
from triptych.apps.cli.app import app
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.base.config import ClusterConfig, EncoderConfig, PDConfig, ProxyConfig, ServeConfig
from triptych.base.config.flags import flags_of


@pytest.mark.parametrize("command", ["serve", "proxy", "encoder", "pd", "check"])
def test_every_flag_of_a_service_is_in_its_help_with_its_variable(command):
    configs = {"proxy": ProxyConfig, "encoder": EncoderConfig, "pd": PDConfig, "serve": ServeConfig}
    config = configs.get(command, ClusterConfig)
    text = CliRunner().invoke(app, [command, "--help"]).output
    for flag in flags_of(config):
        assert flag.option in text or flag.negation in text
        assert f"TRIPTYCH_{flag.name.upper()}" in text.replace("\n", " ").replace(" " * 34, "")


def test_a_missing_model_folder_is_a_clear_error():
    assert_refused(
        triptych("serve", "/no/such/folder"), "MODEL=/no/such/folder does not exist", "MODEL=/folder"
    )


@pytest.mark.parametrize("command", ["serve", "check", "profile"])
def test_a_device_that_is_not_served_is_a_clear_error(command):
    refused = triptych(command, "--device", "xpu")
    assert_refused(refused, "--device", "cpu, cuda or cuda:N")
    assert "Traceback" not in refused.stderr


def test_a_folder_without_a_config_is_a_clear_error(tmp_path):
    assert_refused(triptych("serve", str(tmp_path)), "config.json", "safetensors")


def test_a_port_in_use_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_refused(
            triptych("serve", str(DEMO_MODEL), "--port", str(port)), f"--port {port}", "picks another"
        )


def test_a_service_alone_needs_a_store():
    assert_refused(triptych("proxy"), "--store")
    assert_refused(triptych("encoder"), "--store")


def test_memory_that_does_not_fit_is_an_error_with_the_sum():
    result = triptych("serve", str(DEMO_MODEL), "--kv-memory", "900TiB", "--port", "0", "--grpc-port", "0")
    assert_refused(result, "needs", "are available", "--kv-memory", "together")


def test_heads_that_cannot_be_divided_among_the_ranks_are_an_error_that_names_what_can():
    refused = triptych("check", str(DEMO_MODEL), "--tensor-parallel", "7")
    assert_refused(refused, "attention heads", "7 ranks", "give --tensor-parallel one of 1")


def test_a_proxy_open_to_the_network_needs_api_keys_or_a_flag_that_allows_it_without(tmp_path):
    store = ("--store", "redis://127.0.0.1:1/0", "--host", "0.0.0.0")
    assert_refused(triptych("proxy", *store), "--api-key-file", "--no-auth", "127.0.0.1")
    assert_refused(triptych("serve", str(DEMO_MODEL), "--host", "0.0.0.0"), "--api-key-file", "--no-auth")
    missing = tmp_path / "keys"
    assert_refused(
        triptych("proxy", *store, "--api-key-file", str(missing)), "--api-key-file", "cannot be read"
    )


_STORE = ("--store", "redis://127.0.0.1:1/0")
#: Runs `triptych` as if the packages of these extras were not there.
_CORE_ALONE = """
import importlib.abc, re, sys
from importlib.metadata import packages_distributions, requires

extras = {re.match(r"[\\w-]+", line)[0].lower() for line in requires("triptych") if "extra ==" in line}
core = {re.match(r"[\\w-]+", line)[0].lower() for line in requires("triptych") if "extra ==" not in line}
missing = {
    module
    for module, names in packages_distributions().items()
    if any(name.lower() in extras - core for name in names)
}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from triptych.apps.cli import main

main()
"""


def on_a_core_install(*words: str) -> subprocess.CompletedProcess[str]:
    """`triptych` with these words, where no extra is installed."""
    return subprocess.run(
        [sys.executable, "-c", _CORE_ALONE, *words], text=True, capture_output=True, timeout=50, check=False
    )


ROWS = [
    (("check",), "worker"),
    (("plan",), "bench"),
    (("cert", "tls"), "cert"),
    (("encoder", *_STORE), "worker"),
    (("pd", *_STORE), "worker"),
    (("colocated", *_STORE), "worker"),
    (("namespace", str(DEMO_MODEL)), "worker"),
    (("tones", "555", "-o", "tones.wav"), "worker"),
    (("profile",), "worker"),
    (("bench", "workloads"), "bench"),
]


@pytest.mark.parametrize(("words", "extra"), matrix(ROWS, quick=3), ids=[row[0][0] for row in ROWS])
def test_a_command_names_the_extra_that_it_needs(words, extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = on_a_core_install(*words)
    assert_refused(refused, f"triptych {words[0]}", f"pip install 'triptych[{extra}]'")
    assert "Traceback" not in refused.stderr


def test_the_doctor_of_a_core_install_says_what_a_worker_needs():
    ran = on_a_core_install("doctor", "--port", "0", "--grpc-port", "0")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "is not installed: no more is known here" in ran.stdout
    assert "pip install 'triptych[worker]'" in ran.stdout
