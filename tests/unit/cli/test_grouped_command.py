"""The help of services: the usual options, and with --help-all every option once, in groups."""

from __future__ import annotations

import re
from collections import Counter

import click
import pytest
from click.testing import CliRunner

from support.options import parse
from triptych.apps.cli.app import app
from triptych.apps.cli.grouped_command import COMMON, EXPERT, GROUPS, TITLES, group_of
from triptych.apps.launch.model_path import DEMO_MODEL, resolve_demo, resolve_model
from triptych.apps.launch.plan.cores import share_cores
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


#: What is said in words, and what a config without flags comes to on four CPU cores.
IN_WORDS = {
    "encoders": (
        "one per core, up to 4; else 1",
        lambda: share_cores(ServeConfig(), 4).encoders.maximum == 4,
    ),
    "encoder_threads": ("cores by encoders", lambda: share_cores(ServeConfig(), 4).encoder_threads == 1),
    "demo": ("images", lambda: resolve_model(resolve_demo(ServeConfig().demo, "")) == DEMO_MODEL),
    "run_dir": ("a new temporary folder", lambda: not ServeConfig().run_dir),
    "worker_kind": ("what the device says of itself", lambda: not PDConfig().worker_kind),
    "encoder_graph_budgets": ("from the smallest", lambda: not EncoderConfig().encoder_graph_budgets),
}


@pytest.mark.parametrize(
    ("command", "config"),
    [("serve", ServeConfig), ("proxy", ProxyConfig), ("encoder", EncoderConfig), ("pd", PDConfig)],
    ids=["serve", "proxy", "encoder", "pd"],
)
def test_the_defaults_that_help_prints_are_those_that_a_command_without_flags_runs_with(command, config):
    assert parse(config, command) == config()
    context = app.commands[command].make_context(command, [])
    for option in context.command.params:
        if not isinstance(option, click.Option) or option.name not in context.params:
            continue
        printed = option.get_help_extra(context).get("default")
        if printed in (None, "(none)"):
            assert context.params[option.name] in ("", None, (), False), option.name
        elif printed.startswith("("):
            words, holds = IN_WORDS[option.name]
            assert words in printed and holds(), option.name
        elif option.secondary_opts:
            assert context.params[option.name] is (f"--{printed}" in option.opts), option.name
        else:
            assert option.type_cast_value(context, printed) == context.params[option.name], option.name
