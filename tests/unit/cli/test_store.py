"""`triptych store`: the users of an ACL file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from click.testing import CliRunner

from support.options import assert_refused, triptych
from triptych.apps.cli.app import app


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
