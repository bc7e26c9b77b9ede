"""Configs made of command lines, and commands run to their end."""

from __future__ import annotations

import logging
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from click.testing import CliRunner

from triptych.apps.cli import CONFIG_EXIT
from triptych.apps.cli.app import app
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.base.config import ServeConfig
from triptych.base.config.flags import Config, config_from
from triptych.base.errors import ConfigError

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


@dataclass(frozen=True)
class Ended:
    """How a command has ended."""

    returncode: int
    stdout: str
    stderr: str


def triptych(*words: str) -> Ended:
    """`triptych` with these words, run to its end in this process: what is refused starts nothing."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        result = CliRunner().invoke(app, list(words), prog_name="triptych")
    finally:
        root.handlers[:], level = before
        root.setLevel(level)
    error = result.exception
    if isinstance(error, ConfigError):
        return Ended(CONFIG_EXIT, result.stdout, f"{result.stderr}triptych: {error}\n")
    if error is not None and not isinstance(error, SystemExit):
        raise error
    return Ended(result.exit_code, result.stdout, result.stderr)


def assert_refused(result: Ended | subprocess.CompletedProcess[str], *words: str) -> None:
    """The command ended as one that cannot work, and said all of `words`."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr
