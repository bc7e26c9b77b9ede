"""A server whose users are those of the roles, and an administrator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from support.stores.server import ADMIN, StoreServer
from triptych.apps.access import OPTIONAL_ROLES, ROLES, acl_lines, password_hash, user_name


def role_password(role: str) -> str:
    return f"{role}-password"


def role_url(url: str, role: str, db: int = 0) -> str:
    """The address with the role's user."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{user_name(role)}:{role_password(role)}@{rest.removesuffix('/0')}/{db}"


def admin_url(url: str) -> str:
    """The address with the administrator."""
    return url.replace("://", f"://{ADMIN[0]}:{quote(ADMIN[1])}@")


def write_users(path: Path) -> Path:
    """Writes the ACL file."""
    lines = acl_lines({role: password_hash(role_password(role)) for role in (*ROLES, *OPTIONAL_ROLES)})
    admin = f"user {ADMIN[0]} on #{password_hash(ADMIN[1])} ~* &* +@all"
    path.write_text("\n".join([*lines, admin, ""]))
    return path


@contextmanager
def guarded_server(folder: Path, binary: str = "", **options: Any) -> Iterator[StoreServer]:
    """A server with the users for the length of a `with`."""
    folder.mkdir(parents=True, exist_ok=True)
    users = write_users(folder / "users.acl")
    server = StoreServer(folder / "server", binary, aclfile=str(users), **options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
