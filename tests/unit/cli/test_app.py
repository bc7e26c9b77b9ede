"""The command line, and the command that runs all of it here."""

from __future__ import annotations

import hashlib
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from click.testing import CliRunner

from support.data.checkpoints import build_checkpoint
from support.matrix import matrix
from support.options import assert_refused, triptych
from triptych.apps.cli.app import app
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.base.config import ClusterConfig, EncoderConfig, PDConfig, ProxyConfig, ServeConfig
from triptych.base.config.flags import flags_of
from triptych.models.identity import model_identity


@pytest.mark.parametrize("command", ["serve", "proxy", "encoder", "pd", "check"])
def test_every_flag_of_a_service_is_in_its_help_with_its_variable(command):
    configs = {"proxy": ProxyConfig, "encoder": EncoderConfig, "pd": PDConfig, "serve": ServeConfig}
    config = configs.get(command, ClusterConfig)
    text = CliRunner().invoke(app, [command, "--help-all"]).output
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
#: Runs `triptych` as if the packages of all extras but the one named first were not there.
_CORE_ALONE = """
import importlib.abc, re, sys
from importlib.metadata import packages_distributions, requires

kept = sys.argv.pop(1)
named = [(re.match(r"[\\w-]+", line)[0].lower(), line) for line in requires("triptych")]
extras = {name for name, line in named if "extra ==" in line} | {"matplotlib"}
core = {name for name, line in named if "extra ==" not in line or f'extra == "{kept}"' in line}
missing = {"triptych_bench"} | {
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


def on_a_core_install(*words: str, extra: str = "none") -> subprocess.CompletedProcess[str]:
    """`triptych` with these words, where no other extra is installed."""
    return subprocess.run(
        [sys.executable, "-c", _CORE_ALONE, extra, *words],
        text=True,
        capture_output=True,
        timeout=50,
        check=False,
    )


ROWS = [
    (("check",), "worker"),
    (("plan",), "triptych-bench"),
    (("cert", "tls"), "cert"),
    (("ask", "Hello"), "client"),
    (("top", "--once"), "top"),
    (("doctor",), "doctor"),
    (("encoder", *_STORE), "worker"),
    (("pd", *_STORE), "worker"),
    (("colocated", *_STORE), "worker"),
    (("namespace", str(DEMO_MODEL)), "worker"),
    (("tones", "555", "-o", "tones.wav"), "worker"),
    (("profile",), "triptych-bench"),
    (("bench", "workloads"), "triptych-bench"),
    (("transcribe", "a.wav"), "client"),
]


@pytest.mark.parametrize(("words", "extra"), matrix(ROWS, quick=6), ids=[row[0][0] for row in ROWS])
def test_a_command_names_the_extra_that_it_needs(words, extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.wav").touch()
    refused = on_a_core_install(*words)
    remedy = extra if "-" in extra else f"'triptych[{extra}]'"
    assert_refused(refused, f"triptych {words[0]}", f"pip install {remedy}")
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("name", ["Client", "AsyncClient"])
def test_a_client_without_its_package_names_the_extra(name):
    code = f"import sys; sys.modules['httpx2'] = None; import triptych; triptych.{name}"
    refused = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=50)
    assert refused.returncode == 1
    assert f"triptych.{name} needs httpx2: pip install 'triptych[client]'" in refused.stderr


def test_the_doctor_of_a_core_install_says_what_a_worker_needs():
    ran = on_a_core_install("doctor", "--port", "0", "--grpc-port", "0", extra="doctor")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "is not installed: no more is known here" in ran.stdout
    assert "pip install 'triptych[worker]'" in ran.stdout


def test_tones_are_written_to_a_file(tmp_path):
    made = triptych("tones", "5551234", "-o", str(tmp_path / "tones.wav"))
    assert (made.returncode, made.stderr) == (0, "")
    assert soundfile.info(tmp_path / "tones.wav").duration == pytest.approx(2.45, abs=0.01)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"model_revision": "a" * 40}, {}])
def test_the_namespace_is_that_of_encoder_workers_with_the_same_options(options):
    model = build_checkpoint("qwen3_vl")
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    result = CliRunner().invoke(app, ["namespace", str(model), *words])
    identity = model_identity(
        model, dtype=options.get("dtype", "float32"), revision=options.get("model_revision", "")
    )
    assert result.output == identity.namespace + "\n"


def test_a_quantization_that_no_worker_has_makes_no_namespace():
    result = CliRunner().invoke(app, ["namespace", str(DEMO_MODEL), "--quantization", "int4"])
    assert result.exit_code == 2 and "--quantization" in result.output


def test_a_made_key_goes_to_the_file_and_is_shown_beside_it():
    made = triptych("key", "alice")
    assert re.fullmatch(r"alice sha256:[0-9a-f]{64}\n", made.stdout)
    assert re.search(r"tk-[A-Za-z0-9_-]{43}\n", made.stderr)
    assert_refused(triptych("key", "al ice"), "not a valid name")


def test_certificates_are_made_and_the_flags_that_name_them_are_said(tmp_path):
    made = triptych("cert", str(tmp_path / "tls"), "--host", "10.0.0.6", "--host", "models.example.com")
    assert (made.returncode, made.stderr) == (0, "")
    assert f"--tls-cert-file {tmp_path}/tls/cert.pem --tls-key-file {tmp_path}/tls/key.pem" in made.stdout
    assert f"--http-cert-file {tmp_path}/tls/cert.pem" in made.stdout
    assert f"--ca-file {tmp_path}/tls/ca.pem" in made.stdout
    assert_refused(triptych("cert", str(tmp_path / "other"), "--host", "http://x"), "--host 'http://x'")


def test_store_acl_prints_the_users_with_hashes_of_the_passwords_in_files(tmp_path: Path) -> None:
    words = []
    for role in ("proxy", "encoder", "pd", "vllm"):
        (tmp_path / role).write_text(f"{role} hush\n")
        words += [f"--{role}-password-file", str(tmp_path / role)]
    found = CliRunner().invoke(app, ["store", "acl", *words])
    assert found.exit_code == 0
    assert "hush" not in found.output
    for role in ("proxy", "encoder", "pd", "vllm"):
        hashed = hashlib.sha256(f"{role} hush".encode()).hexdigest()
        assert f"user triptych-{role} reset on #{hashed} " in found.output


def test_a_password_file_of_a_role_that_cannot_be_read_is_named_by_its_flag(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert_refused(triptych("store", "acl", "--pd-password-file", missing), "--pd-password-file", "be read")
