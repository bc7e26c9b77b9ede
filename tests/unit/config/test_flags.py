"""Flags: declared once, written on command lines and read back."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from support.options import parse
from triptych.base.config import (
    ColocatedConfig,
    EncoderConfig,
    PDConfig,
    ProxyConfig,
    ServeConfig,
    WorkerRange,
)
from triptych.base.config.flags import Config, Flag, arguments, config_from, flags_of, secrets_of


@pytest.mark.parametrize("config", [ProxyConfig, EncoderConfig, PDConfig, ServeConfig])
def test_every_flag_has_a_help_text_and_a_default(config):
    flags = flags_of(config)
    assert len(flags) > 8
    assert all(flag.help and flag.default is not None for flag in flags)


COMMANDS = {
    ProxyConfig: "proxy",
    EncoderConfig: "encoder",
    PDConfig: "pd",
    ColocatedConfig: "colocated",
    ServeConfig: "serve",
}
_WORDS = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters=","), min_size=1)


def _values(flag: Flag) -> st.SearchStrategy[object]:
    """The values that a flag may have."""
    if flag.choices:
        return st.sampled_from(flag.choices)
    if isinstance(flag.default, bool):
        return st.booleans()
    least, most = flag.bounds
    if isinstance(flag.default, WorkerRange):
        number = st.integers(0 if flag.to_zero else 1, most or 0)
        given = st.tuples(number, number).map(lambda two: WorkerRange(*sorted(two)))
        return given.filter(lambda workers: workers.scaled or workers.most >= (least or 0))
    if isinstance(flag.default, int):
        return st.integers(least or 0, (1 << 50) if most is None else most)
    if isinstance(flag.default, float):
        return st.floats(least or 0, 1e9 if most is None else most)
    return _WORDS


@pytest.mark.parametrize("config", COMMANDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_config_survives_the_way_through_a_command_line(config: type[Config], data: st.DataObject):
    flags = [flag for flag in flags_of(config) if not flag.secret]
    some = data.draw(st.fixed_dictionaries({}, optional={flag.name: _values(flag) for flag in flags}))
    made = config_from(config, some)
    assert parse(config, COMMANDS[config], *arguments(made)) == made


@settings(max_examples=25, deadline=None)
@given(secrets=st.fixed_dictionaries({name: _WORDS for name in ("store", "internal_token", "api_key")}))
def test_secrets_survive_the_way_through_variables(secrets: dict[str, str]):
    made = config_from(ProxyConfig, secrets)
    with CliRunner(env=secrets_of(made)).isolation():
        assert parse(ProxyConfig, "proxy", *arguments(made)) == made


def test_secrets_reach_children_beside_their_command_line():
    made = ProxyConfig(internal_token="hush-1-0123456789", api_key="hush-2,hush-3", store="unix://:hush-4@/x")
    assert not any("hush" in word for word in arguments(made))
    assert secrets_of(made) == {
        "TRIPTYCH_STORE": "unix://:hush-4@/x",
        "TRIPTYCH_INTERNAL_TOKEN": "hush-1-0123456789",
        "TRIPTYCH_API_KEY": "hush-2,hush-3",
    }
    with CliRunner(env=secrets_of(made)).isolation():
        config = parse(ProxyConfig, "proxy")
    assert (config.internal_token, config.api_key) == ("hush-1-0123456789", "hush-2,hush-3")
    assert config.store == "unix://:hush-4@/x"
    assert "hush" not in repr(config)
