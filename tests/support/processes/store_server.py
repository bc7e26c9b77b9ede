"""Valkey or Redis servers with options of the test's own: an ACL file, TLS, little memory."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.ec_connector.access.acl import acl_lines, password_hash, user_name
from triptych.ec_connector.access.uses import ROLES
from triptych.launch.embedded_store import find_server_binary

PATIENCE = 20.0
#: The password of the administrator that `acl_file` adds.
ADMIN = "the administrator's"


@dataclass(frozen=True)
class StoreServer:
    """A running server, on a unix socket and on the ports that its options name."""

    path: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    @property
    def admin_url(self) -> str:
        """With the user that `acl_file` adds."""
        return f"unix://admin:{ADMIN.replace(' ', '%20')}@{self.path}"

    def role_url(self, role: str, db: int = 0) -> str:
        """With the user of a role in `acl_file`."""
        return f"unix://{user_name(role)}:{role_password(role)}@{self.path}?db={db}"


def role_password(role: str) -> str:
    return f"{role}-password"


def acl_file(path: Path) -> Path:
    """An ACL file with the users of all roles, and an administrator."""
    lines = acl_lines({role: password_hash(role_password(role)) for role in ROLES})
    admin = f"user admin on #{password_hash(ADMIN)} ~* &* +@all"
    path.write_text("\n".join([*lines, admin, ""]))
    return path


@contextlib.contextmanager
def store_server(folder: Path, *words: str, program: Sequence[str] = ()) -> Iterator[StoreServer]:
    """A server with these options; the program of `triptych serve` unless another one is named."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "s.sock"
    options = {"unixsocket": str(path), "dir": str(folder), "save": "", "maxmemory-policy": "volatile-lru"}
    ports = () if "--port" in words else ("--port", "0")
    command = [*(program or [str(find_server_binary())]), *ports]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen([*command, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _listens(path):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.01)
        yield StoreServer(path, process)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.connect(str(path))
        return True
    return False
