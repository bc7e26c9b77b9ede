"""What each role runs on the store: the commands, their scripts' commands, and the keys that these touch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from triptych.registry import leases, minute_counts, registry, scaling
from triptych.store import control, keys, kv_budget, shares

#: A command of a script, and the number of its key where that is a plain KEYS[n].
_CALL = re.compile(r"redis\.p?call\('(\w+)'(?:,\s*KEYS\[(\d+)\])?(,)?")

#: A command and the pattern of its key; without one: "".
Grant = tuple[str, str]

#: Every value and its parts.
EMBEDDINGS = keys.EMBEDDING + "*"
KV_BLOCKS = keys.KV + "*"


@dataclass(frozen=True, slots=True)
class Use:
    """A command, or a script of EVAL, with the patterns of its keys."""

    keys: tuple[str, ...] = ()
    command: str = "eval"
    script: str = ""

    def grants(self) -> Iterator[Grant]:
        """Each command and key that the server is asked for. A key that a script computes is one of all."""
        yield from ((self.command, key) for key in self.keys or ("",))
        for name, number, more in _CALL.findall(self.script):
            touched = (self.keys[int(number) - 1],) if number else self.keys if more else ("",)
            yield from ((name.lower(), key) for key in touched)


def _script(text: str, *touched: str) -> Use:
    return Use(touched, script=text)


def _on_embeddings(command: str) -> Use:
    return Use((EMBEDDINGS,), command)


def _on_kv_blocks(command: str) -> Use:
    return Use((KV_BLOCKS,), command)


#: What only a Redis Cluster is asked.
IN_CLUSTERS = (Use(command="cluster|slots"), Use(command="asking"))
_CONNECT = (Use(command="ping"), Use(command="info"), Use(command="select"), *IN_CLUSTERS)
_LOOK_UP = _script(control.LOOK_UP, EMBEDDINGS)
_REGISTRATION = (
    _script(registry.REGISTER, *registry.WORKER_KEYS),
    _script(registry.WITHDRAW, *registry.WORKER_KEYS),
)

_USAGE = keys.usage("*", "*", "*")
_KV_USAGE = keys.kv_usage("*", "*")

#: Of KV blocks.
_ON_KV = (
    _script(control.LOOK_UP, KV_BLOCKS),
    *map(_on_kv_blocks, ("get", "getrange", "set")),
    _script(control.DROP_DAMAGED, KV_BLOCKS),
    _script(control.DELETE_PARTS, KV_BLOCKS),
    _script(shares.DELETE, KV_BLOCKS),
    _script(kv_budget.COUNT_KV, *_KV_USAGE),
    _script(kv_budget.GIVE_UP_KV, *_KV_USAGE),
    _script(kv_budget.TOUCH_KV, _KV_USAGE[1]),
)

#: Each role's uses of the store.
ROLES: dict[str, tuple[Use, ...]] = {
    "proxy": (
        *_CONNECT,
        _LOOK_UP,
        _script(control.EPOCH, keys.EPOCH),
        _script(registry.LOOK, *registry.WORKER_KEYS, keys.PROXIES, keys.EPOCH),
        _script(registry.COLLECT, keys.WORKERS, keys.WORKER_DEADLINES, keys.PROXIES),
        _script(leases.COLLECT, *leases.KEYS),
        _script(scaling.PUBLISH, *keys.demands("*")),
        _script(scaling.LEAVE, *keys.demands("*")),
        _script(scaling.READ, *scaling.DECISION_KEYS),
        _script(scaling.ANNOUNCE, *scaling.DECISION_KEYS, keys.RULES),
        _script(scaling.AGREE, keys.RULES),
        _script(minute_counts.COUNT, keys.minute_counts("*", "*")),
    ),
    "encoder": (
        *_CONNECT,
        *_REGISTRATION,
        _script(registry.LIVE_WORKERS, *registry.WORKER_KEYS),
        _LOOK_UP,
        _on_embeddings("set"),
        _script(control.DROP_DAMAGED, EMBEDDINGS),
        _script(control.DELETE_PARTS, EMBEDDINGS),
        # Of tenants, where keys are in use.
        _script(shares.TAKE, *_USAGE),
        _script(shares.CORRECT, *_USAGE),
        _script(shares.DELETE, EMBEDDINGS),
        Use(_USAGE[:1], "hrandfield"),
        Use(_USAGE[1:], "zscan"),
        _on_embeddings("exists"),
        _script(leases.ACQUIRE, *leases.KEYS),
        _script(leases.RENEW, *leases.KEYS),
        _script(leases.RELEASE, *leases.KEYS),
    ),
    "pd": (
        *_CONNECT,
        *_REGISTRATION,
        # In front of vLLM, which loads the item after the look-up.
        _LOOK_UP,
        _on_embeddings("get"),
        _on_embeddings("getrange"),
        # With --share-prefixes.
        *_ON_KV,
    ),
}

#: Roles whose user only some stores have. "vllm": the connector that vLLM loads, consumer and producer.
OPTIONAL_ROLES: dict[str, tuple[Use, ...]] = {
    "vllm": (
        *_CONNECT,
        _LOOK_UP,
        _on_embeddings("get"),
        _on_embeddings("getrange"),
        _on_embeddings("set"),
        _script(control.DROP_DAMAGED, EMBEDDINGS),
        _script(control.DELETE_PARTS, EMBEDDINGS),
        # By the tier of its KV cache.
        *_ON_KV,
    ),
}


def grants_of(role: str) -> set[Grant]:
    """What the role must be allowed, and nothing else."""
    return {grant for use in (ROLES | OPTIONAL_ROLES)[role] for grant in use.grants()}


#: The key patterns of a selector.
_Keys = frozenset[str]


def user_name(role: str) -> str:
    """The user that a role logs in as."""
    return f"triptych-{role}"


def password_hash(password: str) -> str:
    """A password as an ACL file holds it."""
    return hashlib.sha256(password.encode()).hexdigest()


def acl_lines(hashes: Mapping[str, str]) -> list[str]:
    """The lines of an ACL file: no default user, and a user for each role with its password's SHA-256.

    A role without one cannot log in; an optional role without one has no user. Redis 7 or Valkey is needed:
    permissions are selectors, each one some commands on some keys.
    """
    roles = (*ROLES, *(role for role in OPTIONAL_ROLES if role in hashes))
    users = (
        f"user {user_name(role)} reset on {login(hashes.get(role, ''))}{' '.join(rules(grants_of(role)))}"
        for role in roles
    )
    return ["user default off", *users]


def login(hashed: str) -> str:
    return f"#{hashed} " if hashed else ""


def rules(grants: Iterable[Grant]) -> list[str]:
    """The ACL rules that allow just these commands on these keys."""
    touched: dict[str, set[str]] = {}
    for command, key in grants:
        touched.setdefault(command, set()).add(key)
    commands: dict[_Keys, list[str]] = {}
    for command, patterns in touched.items():
        commands.setdefault(frozenset(patterns), []).append(command)
    keyless = frozenset({""})
    selectors = [f"+{command}" for command in sorted(commands.pop(keyless, []))]
    return selectors + sorted(_selector(patterns, names) for patterns, names in commands.items())


def _selector(patterns: _Keys, commands: Iterable[str]) -> str:
    parts = [*(f"~{pattern}" for pattern in sorted(patterns)), *(f"+{name}" for name in sorted(commands))]
    return f"({' '.join(parts)})"
