"""What each role runs on the store, as read from its scripts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from triptych.apps.access import (
    EMBEDDINGS,
    KV_BLOCKS,
    OPTIONAL_ROLES,
    ROLES,
    Use,
    acl_lines,
    grants_of,
    password_hash,
    rules,
)
from triptych.store import keys

ALL_ROLES = ROLES | OPTIONAL_ROLES
#: Commands with which a store is run, emptied or watched.
OPERATORS = {"flushall", "flushdb", "keys", "scan", "config", "debug", "shutdown", "acl", "monitor", "client"}


def test_a_scripts_commands_and_their_keys_are_read_from_its_text() -> None:
    text = """
    local time = redis.call('TIME')
    redis.call('ZADD', KEYS[2], 1, ARGV[1])
    redis.call('EXPIRE', computed, 5)
    """
    assert set(Use(("a:*", "b"), script=text).grants()) == {
        *{("eval", "a:*"), ("eval", "b"), ("time", ""), ("zadd", "b")},
        *{("expire", "a:*"), ("expire", "b")},
    }


@pytest.mark.parametrize("role", ALL_ROLES)
def test_no_call_of_a_script_escapes_the_reading(role: str) -> None:
    for use in ALL_ROLES[role]:
        calls = use.script.count("redis.call") + use.script.count("redis.pcall")
        written_out = use.script.count("redis.call('") + use.script.count("redis.pcall('")
        assert calls == written_out, "the command's name is written out"
        assert len(list(use.grants())) >= calls


@pytest.mark.parametrize("role", ALL_ROLES)
def test_no_role_may_run_an_operators_command(role: str) -> None:
    assert not OPERATORS & {command for command, _ in grants_of(role)}


def test_only_encoders_write_and_only_pd_workers_read_embeddings_and_vllm_does_both() -> None:
    may = {
        role: {command for command, key in grants_of(role) if key == EMBEDDINGS} - {"eval"}
        for role in ALL_ROLES
    }
    assert may == {
        "proxy": {"getrange", "expire"},
        "encoder": {"getrange", "expire", "set", "unlink", "exists"},
        "pd": {"getrange", "expire", "get"},
        "vllm": {"getrange", "expire", "get", "set", "unlink"},
    }


def test_only_pd_workers_and_vllms_tier_reach_kv_blocks() -> None:
    may = {
        role: {command for command, key in grants_of(role) if key == KV_BLOCKS} - {"eval"}
        for role in ALL_ROLES
    }
    assert may == {
        "proxy": set(),
        "encoder": set(),
        "pd": {"getrange", "expire", "get", "set", "unlink"},
        "vllm": {"getrange", "expire", "get", "set", "unlink"},
    }


def test_proxies_write_no_registration_and_workers_no_demand_and_no_decision() -> None:
    assert not {("hset", keys.WORKERS), ("zadd", keys.WORKER_DEADLINES)} & grants_of("proxy")
    for role in ("encoder", "pd", "vllm"):
        assert not [key for _, key in grants_of(role) if key.startswith("{scaling}")]
    for role in ("pd", "vllm"):
        assert not [key for _, key in grants_of(role) if key.startswith("{leases}")]
    assert {key for _, key in grants_of("vllm")} == {"", EMBEDDINGS, KV_BLOCKS, *keys.kv_usage("*", "*")}


CHART = Path(__file__).parents[2] / "deploy" / "helm" / "triptych"


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
