"""Ray with its own autoscaler, whose nodes are processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support.processes.cluster import free_port, wait_for
from support.processes.processes import survivors

#: The head's id, as the fake provider counts nodes.
_HEAD = "f" * 51 + "00000"
_HEAD_TYPE = "ray.head.default"
_LISTS = (
    *("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands"),
    *("setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands"),
)


@contextlib.contextmanager
def autoscaled_ray(
    folder: Path, head: Mapping[str, float], node: Mapping[str, float], most: int
) -> Iterator[str]:
    """The address of a Ray with a head of these resources, which adds up to `most` nodes like `node`."""
    from ray.util import get_node_ip_address

    port = free_port()
    address = f"{get_node_ip_address()}:{port}"
    config = folder / "autoscaler.json"
    config.write_text(json.dumps(_config(address, head, node, most)))
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
        *("--port", str(port), "--include-dashboard", "false"),
        *("--num-cpus", str(int(head["CPU"])), "--object-store-memory", str(80 << 20)),
        f"--autoscaling-config={config}",
    ]
    environment = os.environ | {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD,
    }
    with (folder / "ray.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        wait_for("Ray's head", lambda: _started(folder, process))
        yield address
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        _end(address)


def _config(address: str, head: Mapping[str, float], node: Mapping[str, float], most: int) -> dict[str, Any]:
    return {
        "cluster_name": "fake",
        "max_workers": most,
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 10,
        "provider": {
            "type": "fake_multinode",
            "head_node_id": _HEAD,
            "gcs_address": address,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "use_node_id_as_ip": True,
        },
        "auth": {"ssh_user": "nobody"},
        "available_node_types": {
            _HEAD_TYPE: {"resources": dict(head), "node_config": {}, "max_workers": 0},
            "added": {"resources": dict(node), "node_config": {}, "min_workers": 0, "max_workers": most},
        },
        "head_node_type": _HEAD_TYPE,
        # What `ray up` would fill in.
        **{name: [] for name in _LISTS},
        **{name: {} for name in ("file_mounts", "docker", "head_node", "worker_nodes")},
        "file_mounts_sync_continuously": False,
    }


def _started(folder: Path, process: subprocess.Popen[bytes]) -> bool:
    text = (folder / "ray.log").read_text(errors="replace")
    if process.poll() is not None:
        raise AssertionError(f"Ray's head ended with {process.returncode}: {text[-3000:]}")
    return "Ray runtime started" in text


def _end(address: str) -> None:
    """Ends the nodes that the autoscaler has started and not ended: processes that name our GCS."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if address.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                pids.append(int(folder.name))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert survivors(pids) == []
