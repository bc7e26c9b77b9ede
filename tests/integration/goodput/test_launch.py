"""The cluster that a measurement starts ends with it, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from support.data.checkpoints import build_checkpoint
from support.processes.processes import lives, survivors

_RUN = """
import json, sys, time
from triptych.goodput.launch import launched, parse_shape

with launched(parse_shape("1E1PD"), sys.argv[1], [], 60.0) as cluster:
    print(json.dumps({"serve": cluster.pid, **cluster.processes}), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A socket's path has room for 100 characters."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def test_a_run_that_is_killed_leaves_no_cluster_behind(short_folder: str) -> None:
    command = [sys.executable, "-c", _RUN, str(build_checkpoint("qwen3_vl"))]
    own = os.environ | {"TMPDIR": short_folder}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) as run:
        assert run.stdout is not None
        pids = json.loads(run.stdout.readline())
        assert {"serve", "proxy", "encoder-0", "pd-0"} <= pids.keys()
        assert all(map(lives, pids.values()))
        run.kill()
    left = survivors(pids.values())
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
