"""The dependencies that the images install before the code."""

from __future__ import annotations

import tomllib
from pathlib import Path

from deploy.docker.requirements import requirements

ROOT = Path(__file__).parents[4]


def test_the_proxy_needs_no_extra_and_a_worker_its_own():
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    assert requirements(text, []) == project["dependencies"]
    assert requirements(text, ["worker"]) == [
        *project["dependencies"],
        *project["optional-dependencies"]["worker"],
    ]
