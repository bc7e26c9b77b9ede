"""API keys: what a key file may hold, whose key it is, and what keeps tenants apart."""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path

import pytest

from support.clock import Clock
from triptych.base.errors import ConfigError, RateLimited
from triptych.base.hashing import prefix_root
from triptych.base.types import SamplingParams
from triptych.proxy.auth.keys import (
    LOOK_SECONDS,
    KeyEntry,
    KeyLimits,
    KeyRing,
    KeyTable,
    Principal,
    new_key,
    parse_key_lines,
    parse_plain_keys,
)
from triptych.proxy.auth.limits import PrincipalLimits
from triptych.proxy.call.chat import ChatCall

NONE = KeyLimits()


def _digest(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def test_a_made_key_opens_what_its_line_describes():
    key, line = new_key("alice")
    assert key not in line
    table = KeyTable(parse_key_lines(line, NONE))
    assert table.find(key.encode()) == Principal("alice", NONE)
    assert table.find(key[:-1].encode()) is None
    assert table.find(line.split(":")[1].encode()) is None


def test_a_line_may_give_limits_and_the_others_take_the_defaults():
    text = f"""
    # the first customer
    alice {_digest("a" * 20)} requests-per-minute=60 concurrent-requests=2  # since May
    bob   {_digest("b" * 20)}
    """
    alice, bob = parse_key_lines(text, KeyLimits(tokens_per_minute=7))
    assert alice.principal.limits == KeyLimits(60, 7, 2)
    assert bob.principal.limits == KeyLimits(0, 7, 0)


def test_a_line_may_name_the_models_and_adapters_of_its_key() -> None:
    text = f"alice {_digest('a' * 20)} operator models=qwen,qwen-sql\nbob {_digest('b' * 20)}"
    alice, bob = parse_key_lines(text, NONE)
    assert alice.principal == Principal("alice", NONE, True, frozenset({"qwen", "qwen-sql"}))
    assert bob.principal.models is None
    with pytest.raises(ConfigError, match="line 1: models= names no model"):
        parse_key_lines(f"alice {_digest('a' * 20)} models=,", NONE)
    both = f"alice {_digest('old')} models=a\nalice {_digest('new')}"
    with pytest.raises(ConfigError, match="line 2: the lines of alice give different"):
        parse_key_lines(both, NONE)


def test_an_old_and_a_new_key_of_one_name_are_one_principal():
    text = f"alice {_digest('old')}\nalice {_digest('new')}\n"
    table = KeyTable(parse_key_lines(text, NONE))
    assert table.find(b"old") == table.find(b"new") == Principal("alice", NONE)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("alice", "sha256"),
        ("alice tk-secretsecretsecret", "does not belong here"),
        (f"al:ice {_digest('x')}", "name"),
        (f"{'a' * 65} {_digest('x')}", "name"),
        (f"alice {_digest('x').upper()}", "sha256"),
        (f"alice {_digest('x')} requests-per-minute", "requests-per-minute=N"),
        (f"alice {_digest('x')} requests-per-minute=-1", "requests-per-minute=N"),
        (f"alice {_digest('x')} requests-per-minute=²", "requests-per-minute=N"),
        (f"alice {_digest('x')} requests_per_minute=1", "requests-per-minute=N"),
        (f"alice {_digest('x')} everything=1", "requests-per-minute=N"),
        (f"alice {_digest('x')}\nalice {_digest('y')} concurrent-requests=1", "different limits"),
        (f"alice {_digest('x')}\nalice {_digest('y')} operator", "different limits or options"),
    ],
)
def test_a_line_that_cannot_be_is_named_without_its_content(line, told):
    with pytest.raises(ConfigError, match="line ") as error:
        parse_key_lines(line, NONE)
    assert told in str(error.value)
    assert "secretsecret" not in str(error.value)


def test_keys_of_the_flag_are_principals_of_their_own_that_no_file_can_name():
    first, second = parse_plain_keys("k" * 16 + ", " + "l" * 16 + ",", NONE)
    assert first.principal.id != second.principal.id
    with pytest.raises(ConfigError, match="name"):
        parse_key_lines(f"{first.principal.id} {_digest('x')}", NONE)


def test_a_key_that_can_be_guessed_is_refused():
    with pytest.raises(ConfigError, match="at least 16 characters") as error:
        parse_plain_keys("hunter2", NONE)
    assert "hunter2" not in str(error.value)


def _rewrite(path: Path, text: str) -> None:
    """As an editor or Kubernetes does it: a new file under the old name."""
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    os.replace(scratch, path)


@pytest.mark.parametrize(
    ("text", "found", "warned"),
    [
        (f"alice {_digest('new')}\n", {b"new"}, False),
        ("# nobody\n", set(), False),
        ("alice sha256:no\n", {b"old"}, True),
        (None, {b"old"}, True),
    ],
    ids=["edited", "all withdrawn", "broken", "gone"],
)
def test_an_edited_key_file_counts_at_once_and_a_broken_one_leaves_the_last_keys(
    tmp_path, text, found, warned, caplog
):
    path, clock = tmp_path / "keys", Clock()
    path.write_text(f"alice {_digest('old')}\n")
    ring = KeyRing("", str(path), NONE, clock)
    path.unlink() if text is None else _rewrite(path, text)
    clock.now = 2.0
    assert {key for key in (b"old", b"new") if ring.find(key) == Principal("alice", NONE)} == found
    assert ring.in_use
    assert ("the keys read last stay in use" in caplog.text) is warned


def test_a_key_that_is_appended_opens_in_the_same_second(tmp_path):
    path, clock = tmp_path / "keys", Clock()
    path.write_text(f"alice {_digest('old')}\n")
    ring = KeyRing("", str(path), NONE, clock)
    _rewrite(path, f"alice {_digest('old')}\nbob {_digest('new')}\n")
    clock.now = LOOK_SECONDS / 4
    assert ring.find(b"new") == Principal("bob", NONE)


def test_a_flood_of_wrong_keys_looks_at_the_file_and_complains_only_now_and_then(
    tmp_path, monkeypatch, caplog
):
    path, clock, looks = tmp_path / "keys", Clock(), []
    path.write_text(f"alice {_digest('key')}\n")
    ring = KeyRing("", str(path), NONE, clock)
    path.unlink()
    look = os.stat
    monkeypatch.setattr(os, "stat", lambda *words: looks.append(words) or look(*words))
    for _ in range(1000):
        clock.now += 0.002
        assert ring.find(b"wrong") is None
    assert len(looks) <= 41
    assert caplog.text.count("the keys read last stay in use") <= 3


@pytest.mark.parametrize(
    ("text", "told"), [(None, "cannot be read"), ("# none\n", "no key"), ("x", "line 1")]
)
def test_an_unusable_key_file_is_an_error_at_the_start(tmp_path, text, told):
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        KeyRing("", str(path), NONE)


def _salt(tenant: str, cache_salt: str) -> str:
    return ChatCall("id", "m", (), SamplingParams(), 1.0, cache_salt=cache_salt, tenant=tenant).salt


def test_no_two_pairs_of_tenant_and_salt_make_one_salt():
    pairs = [
        ("", ""),
        ("", "abc"),
        ("a", "bc"),
        ("ab", "c"),
        ("abc", ""),
        ("", "3:abc"),
        ("1", ":abc"),
        ("1:a", "bc"),
    ]
    assert len({_salt(*pair) for pair in pairs}) == len(pairs)
    assert len({prefix_root("model", _salt(*pair)) for pair in pairs}) == len(pairs)


async def test_a_request_counts_until_it_ends_however_it_ends():
    limits, alice = PrincipalLimits(), Principal("alice", KeyLimits(concurrent_requests=1))
    for ending in (None, RuntimeError("broken"), GeneratorExit()):
        with pytest.raises(BaseException) if ending else nullcontext():
            async with limits.admit(alice):
                with pytest.raises(RateLimited, match="concurrent-requests: .* 1 requests") as error:
                    async with limits.admit(alice):
                        raise AssertionError("two requests at once")
                assert error.value.retry_after == 1.0
                if ending:
                    raise ending
        assert limits.running(alice) == 0


async def test_a_client_that_has_read_its_reply_may_send_the_next_request_at_once():
    """A client has the last byte a moment before the call that sent it ends here."""
    limits, alice = PrincipalLimits(), Principal("alice", KeyLimits(concurrent_requests=1))

    async def request() -> None:
        async with limits.admit(alice):
            assert limits.running(alice) == 1

    async with AsyncExitStack() as ending:
        await ending.enter_async_context(limits.admit(alice))
        coming = [asyncio.create_task(request()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in coming)
    await asyncio.gather(*coming)
    assert limits.running(alice) == 0


async def test_each_answer_of_a_call_counts_and_those_of_its_parts_in_turn_count_once():
    limits, alice = PrincipalLimits(), Principal("alice", KeyLimits(concurrent_requests=4))
    async with limits.admit(alice) as session:
        for _ in range(3):  # one part after the other, as windows of a file
            await session.begin(2)
            session.end(2)
        assert limits.running(alice) == 2
        await session.begin(2)
        await session.begin(2)  # beside each other, as prompts of one request
        assert limits.running(alice) == 4
        with pytest.raises(RateLimited, match="each answer of n is one"):
            await session.begin(1)
        with pytest.raises(RateLimited):
            async with limits.admit(alice):
                raise AssertionError("a fifth answer")
    assert limits.running(alice) == 0


async def test_a_refused_request_takes_no_place():
    limits, alice = PrincipalLimits(), Principal("alice", KeyLimits(requests_per_minute=1))
    async with limits.admit(alice):
        pass
    for _ in range(3):
        with pytest.raises(RateLimited, match="requests-per-minute: .* 1 requests") as error:
            async with limits.admit(alice):
                raise AssertionError("a second request in the minute")
        assert 50 < error.value.retry_after <= 60
    assert limits.running(alice) == 0


async def test_tokens_count_when_they_have_been_used_and_only_for_their_principal():
    limits = PrincipalLimits()
    alice, bob = (Principal(name, KeyLimits(tokens_per_minute=10)) for name in ("alice", "bob"))
    for used in (4, 400):
        async with limits.admit(alice) as session:
            session.charge(used)
    with pytest.raises(RateLimited, match="tokens-per-minute"):
        async with limits.admit(alice):
            raise AssertionError("above the tokens of the minute")
    async with limits.admit(bob):
        assert limits.running(bob) == 1


def test_ten_thousand_keys_cost_what_ten_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: of a right key and of a wrong one, how often entries are looked at."""
    looked: list[bytes] = []

    class Digest(bytes):
        def __eq__(self, other: object) -> bool:
            looked.append(self)
            return bytes(self) == other

        __hash__ = bytes.__hash__

    for count in (10, 10_000):
        digests = [Digest(hashlib.sha256(b"%d" % at).digest()) for at in range(count)]
        table = KeyTable(KeyEntry(digest, Principal(f"p{at}", NONE)) for at, digest in enumerate(digests))
        looked.clear()
        found, missed = table.find(b"7"), table.find(b"-1")
        assert found == Principal("p7", NONE) and missed is None
        assert len(looked) <= 2, count


def test_a_wrong_key_is_looked_up_once_unless_the_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, path = Clock(), tmp_path / "keys"
    path.write_text(f"alice {_digest('old')}\n")
    ring = KeyRing("", str(path), NONE, clock)
    looked = []
    find = KeyTable.find
    monkeypatch.setattr(KeyTable, "find", lambda table, key: looked.append(key) or find(table, key))
    clock.now += 10.0
    assert ring.find(b"new") is None
    assert looked == [b"new"]
    path.write_text(f"alice {_digest('old')}\nbob {_digest('new')}\n")
    clock.now += 0.5
    assert ring.find(b"new") == Principal("bob", NONE)
    assert looked == [b"new"] * 3
