"""The store's users, one for each role, as lines of an ACL file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from triptych.apps.access.uses import OPTIONAL_ROLES, ROLES, Grant, grants_of

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
    found = [f"+{command}" for command in sorted(commands.pop(keyless, []))]
    return found + sorted(_selector(patterns, names) for patterns, names in commands.items())


def _selector(patterns: _Keys, commands: Iterable[str]) -> str:
    words = [*(f"~{pattern}" for pattern in sorted(patterns)), *(f"+{name}" for name in sorted(commands))]
    return f"({' '.join(words)})"
