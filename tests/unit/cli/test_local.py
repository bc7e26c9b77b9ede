"""`triptych key`, `cert`, `namespace`, `tones` and `store`."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import soundfile
from click.testing import CliRunner

from support.data.checkpoints import build_checkpoint
from support.options import assert_refused, triptych
from triptych.apps.cli.app import app
from triptych.models.identity import model_identity


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
