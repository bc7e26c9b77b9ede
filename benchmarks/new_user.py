"""A new user's path, timed: clone, `make serve`, paste the printed lines, a right answer about a picture.

    python -m benchmarks new_user

The clone goes to a temporary folder with a new environment of its own. Prints the seconds of each stretch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Seconds that the cluster may take to answer after the installation.
PATIENCE = 180.0


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="triptych-new-user-") as folder:
        clone = Path(folder) / "triptych"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        # The caller's environment of Python and make must not help.
        environment = {
            k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS")
        }
        began = time.monotonic()
        subprocess.run(["make", "install"], cwd=clone, env=environment, check=True, stdout=subprocess.DEVNULL)
        installed = time.monotonic()
        ready, answered, asked = serve_and_ask(clone, environment)
    print(f"install            {installed - began:7.1f} s")
    print(f"make serve: ready  {ready - installed:7.1f} s after the installation")
    print(f"curl: answered     {answered - installed:7.1f} s after the installation")
    print(f"triptych ask       {asked - answered:7.1f} s")


def serve_and_ask(clone: Path, environment: dict[str, str]) -> tuple[float, float, float]:
    """Monotonic times of: ready message, right answer to the pasted curl, right answer to the pasted ask."""
    ports = [free_port(), free_port()]
    words = f"ARGS=--port {ports[0]} --grpc-port {ports[1]}"
    log = clone / "serve.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            ["make", "serve", words], cwd=clone, env=environment, stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while "Ctrl-C ends it." not in log.read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        ready = time.monotonic()
        text = log.read_text()
        curl, ask = (
            line.strip() for line in text.splitlines() if re.match(r"  (curl|\S+/triptych ask) ", line)
        )
        answer = re.search(r"^The answer:  (.*)$", text, re.MULTILINE)
        assert answer is not None
        reply = json.loads(paste(curl))
        answered = time.monotonic()
        assert reply["choices"][0]["message"]["content"].strip() == answer[1], reply
        assert paste(ask).strip() == answer[1]
        return ready, answered, time.monotonic()
    finally:
        server.send_signal(signal.SIGTERM)
        # make passes SIGTERM on to nobody when it runs one command; the supervisor is its child.
        subprocess.run(["pkill", "-TERM", "-P", str(server.pid)], check=False)
        server.wait(60)


def paste(line: str) -> str:
    """Runs a line as pasted into a shell, from another folder."""
    return subprocess.run(
        ["sh", "-c", line], cwd="/", check=True, text=True, capture_output=True, timeout=120
    ).stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
