"""What each role runs on the store, as read from its scripts."""

from __future__ import annotations

import pytest

from triptych.apps.access.uses import EMBEDDINGS, OPTIONAL_ROLES, ROLES, Use, grants_of
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
        "encoder": {"getrange", "expire", "set", "unlink"},
        "pd": {"getrange", "expire", "get"},
        "vllm": {"getrange", "expire", "get", "set", "unlink"},
    }


def test_proxies_write_no_registration_and_workers_no_demand_and_no_decision() -> None:
    assert not {("hset", keys.WORKERS), ("zadd", keys.WORKER_DEADLINES)} & grants_of("proxy")
    for role in ("encoder", "pd", "vllm"):
        assert not [key for _, key in grants_of(role) if key.startswith("{scaling}")]
    for role in ("pd", "vllm"):
        assert not [key for _, key in grants_of(role) if key.startswith("{leases}")]
    assert {key for _, key in grants_of("vllm")} == {"", EMBEDDINGS}
