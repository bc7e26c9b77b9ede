"""Configs made of command lines, and commands run to their end."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from triptych.apps.cli.app import app
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.base.config import ServeConfig
from triptych.base.config.flags import Config, config_from

C = TypeVar("C", bound=Config)


def parse(config: type[C], command: str, *words: str) -> C:
    """The config that `triptych COMMAND WORDS` would run with."""
    return config_from(config, app.commands[command].make_context(command, list(words)).params)


def serve_config(*words: str, model: Path = DEMO_MODEL) -> ServeConfig:
    """The config of `triptych serve` for a resolved model that is served as "demo"."""
    config = parse(ServeConfig, "serve", *words)
    encoder = replace(config.encoder, served_model_name="demo")
    pd = replace(config.pd, served_model_name="demo")
    return replace(config, model=str(model), encoder=encoder, pd=pd)


def triptych(*words: str) -> subprocess.CompletedProcess[str]:
    """`triptych` with these words, run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "triptych.apps.cli", *words],
        text=True,
        capture_output=True,
        timeout=50,
        check=False,
    )


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """The command ended as one that cannot work, and said all of `words`."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr
