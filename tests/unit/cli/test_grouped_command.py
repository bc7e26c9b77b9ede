"""The help of services: the usual options, and with --help-all every option once, in groups."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from click.testing import CliRunner

from triptych.apps.cli.app import app
from triptych.apps.cli.grouped_command import COMMON, EXPERT, GROUPS, TITLES, group_of
from triptych.base.config import ColocatedConfig, EncoderConfig, PDConfig, ProxyConfig, ServeConfig
from triptych.base.config.flags import flags_of

COMMANDS = {
    "serve": ServeConfig,
    "proxy": ProxyConfig,
    "encoder": EncoderConfig,
    "pd": PDConfig,
    "colocated": ColocatedConfig,
}


def shown(command: str, word: str) -> tuple[str, list[str]]:
    """The help, and its options by their names in Python."""
    result = CliRunner().invoke(app, [command, word])
    assert result.exit_code == 0
    names = re.findall(r"^  (?:-\w, )?--([\w-]+)", result.output, flags=re.MULTILINE)
    return result.output, [name.replace("-", "_") for name in names]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_usual_options_and_counts_the_others(command: str) -> None:
    output, names = shown(command, "--help")
    own = {flag.name for flag in flags_of(COMMANDS[command])}
    assert names == [*(name for name in COMMON if name in own), "help", "help_all"]
    counts = map(int, re.findall(r"\b(\d+)\s+[a-z]+[,.]", output.split("--help-all shows")[1]))
    assert sum(counts) == len(own - set(COMMON))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_shows_every_option_once_under_its_group(command: str) -> None:
    output, names = shown(command, "--help-all")
    own = Counter(flag.name for flag in flags_of(COMMANDS[command]))
    assert Counter(names) == own + Counter(["help", "help_all"])
    titles = re.findall(r"^([A-Z]\w+):$", output, flags=re.MULTILINE)
    assert titles == [title for title in TITLES if any(group_of(name) == title for name in own)]


def test_groups_are_titled_and_none_is_left_over() -> None:
    assert {"Common", EXPERT, *(title for title, _ in GROUPS)} == set(TITLES)
    for name, title in {
        "port": "Common",
        "tls_ca_file": "Security",
        "kv_memory": "Memory",
        "x": EXPERT,
    }.items():
        assert group_of(name) == title
