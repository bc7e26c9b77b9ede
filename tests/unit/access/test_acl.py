"""The lines of the ACL file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from triptych.apps.access.uses import ROLES, acl_lines, password_hash, rules

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "triptych"


def test_rules_are_selectors_of_commands_with_equal_keys_and_nothing_is_allowed_beside() -> None:
    grants = [("ping", ""), ("get", "a"), ("get", "b"), ("set", "a"), ("del", "a"), ("info", "")]
    assert rules(grants) == ["+info", "+ping", "(~a +del +set)", "(~a ~b +get)"]


def test_the_default_user_is_off_and_every_role_has_one_user_with_a_hashed_password() -> None:
    lines = acl_lines({role: password_hash("hush") for role in ROLES})
    assert lines[0] == "user default off"
    users = [line.split()[1:5] for line in lines[1:]]
    hashed = "#" + hashlib.sha256(b"hush").hexdigest()
    assert users == [[f"triptych-{role}", "reset", "on", hashed] for role in ("proxy", "encoder", "pd")]
    assert "hush" not in "".join(lines)


def test_vllms_connector_has_a_user_where_it_has_a_password() -> None:
    plain, with_vllm = acl_lines({}), acl_lines({"vllm": password_hash("hush")})
    assert with_vllm[:-1] == plain
    assert with_vllm[-1].startswith(f"user triptych-vllm reset on #{password_hash('hush')} +")


def test_a_role_without_a_password_cannot_log_in() -> None:
    for line in acl_lines({})[1:]:
        assert " #" not in line and " >" not in line and "nopass" not in line


def test_the_charts_users_are_those_that_the_code_needs() -> None:
    expected = acl_lines({role: f"HASH-{role}" for role in ROLES})
    found = (CHART / "files" / "users.acl").read_text().splitlines()
    assert found == expected, "write `acl_lines` into it anew"
    (of_vllm,) = (CHART / "files" / "user-vllm.acl").read_text().splitlines()
    assert of_vllm == acl_lines({"vllm": "HASH-vllm"})[-1], "write its line of `acl_lines` into it anew"
