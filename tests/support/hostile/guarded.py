"""A real cluster that asks for API keys: one store, one proxy, one encoder and one PD worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.data.checkpoints import build_checkpoint
from support.processes.cluster import Cluster, free_port, running_cluster
from triptych.proxy.auth.keys import new_key

#: Names in the key file; `limited` may send two requests in a minute.
TENANTS = {"alice": "", "bob": "", "limited": "requests-per-minute=2 concurrent-requests=1"}
TOKEN = "internal-token-of-the-guarded-cluster"
FAMILY = "qwen3_vl"


@dataclass(frozen=True)
class Guarded:
    """`keys`: each tenant's API key. `key_file` may be edited; the proxy follows within two seconds."""

    cluster: Cluster
    keys: dict[str, str]
    key_file: Path
    checkpoint: Path

    def ask(self, tenant: str, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """The reply to a chat request of the tenant, greedy, 4 tokens; `status` is added to it."""
        body = {"model": FAMILY, "messages": messages, "max_tokens": 4, "temperature": 0} | options
        return self.cluster.post(body, key=self.keys.get(tenant, tenant))

    def add_tenant(self, name: str, limits: str = "") -> str:
        """A new line in the key file; the key."""
        key, line = new_key(name)
        with self.key_file.open("a") as file:
            file.write(f"{line} {limits}\n")
        return key


@contextlib.contextmanager
def guarded_cluster(folder: Path) -> Iterator[Guarded]:
    """Runs for the length of a `with`; the keys and the token travel as an operator would give them."""
    folder.mkdir(parents=True, exist_ok=True)
    key_file = folder / "keys"
    made = {name: new_key(name) for name in TENANTS}
    key_file.write_text("".join(f"{made[name][1]} {limits}\n" for name, limits in TENANTS.items()))
    checkpoint = build_checkpoint(FAMILY, folder / FAMILY)
    metrics_port = free_port()
    words = [*("--served-model-name", FAMILY, "--threads", "1", "--block-size", "8")]
    words += ["--api-key-file", str(key_file), "--metrics-port", str(metrics_port)]
    environment = {"TRIPTYCH_INTERNAL_TOKEN": TOKEN}
    with running_cluster(checkpoint, folder / "run", *words, environment=environment) as cluster:
        cluster.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        yield Guarded(cluster, {name: key for name, (key, _) in made.items()}, key_file, checkpoint)
