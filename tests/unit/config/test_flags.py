"""Flags of all commands, and those of access."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from support.options import assert_refused, parse, triptych
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.base.config import (
    ClusterConfig,
    ColocatedConfig,
    EncoderConfig,
    PDConfig,
    ProxyConfig,
    ScalingConfig,
    ServeConfig,
    WorkerCounts,
    WorkerRange,
    check_advertise,
    check_bind,
    check_front_encryption,
    check_scaling,
    check_worker_encryption,
    format_size,
    front_door_tls,
    internal_tls,
    parse_size,
    read_internal_token,
    with_tls_of,
)
from triptych.base.config.flags import Config, Flag, arguments, config_from, flags_of, secrets_of
from triptych.base.errors import ConfigError


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
    minimum, maximum = flag.bounds
    if isinstance(flag.default, WorkerRange):
        number = st.integers(0 if flag.to_zero else 1, maximum or 0)
        given = st.tuples(number, number).map(lambda two: WorkerRange(*sorted(two)))
        return given.filter(lambda workers: workers.scaled or workers.maximum >= (minimum or 0))
    if isinstance(flag.default, int):
        return st.integers(minimum or 0, (1 << 50) if maximum is None else maximum)
    if isinstance(flag.default, float):
        return st.floats(minimum or 0, 1e9 if maximum is None else maximum)
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


@pytest.mark.parametrize(
    ("words", "encoders", "pd_workers"),
    [
        (("--encoders", "3"), WorkerRange.fixed(3), WorkerRange.fixed(1)),
        (("--encoders", "0..4", "--pd-workers", "1..3"), WorkerRange(0, 4), WorkerRange(1, 3)),
        (("--encoders", "2..2", "--pd-workers", " 1 .. 64 "), WorkerRange.fixed(2), WorkerRange(1, 64)),
    ],
)
def test_a_number_is_fixed_and_a_range_is_scaled(words, encoders, pd_workers):
    for command, kind in (("serve", ServeConfig), ("check", ClusterConfig)):
        config = parse(kind, command, *words)
        assert (config.encoders, config.pd_workers) == (encoders, pd_workers)
        assert config.pools == {"encoder": encoders, "pd": pd_workers}
        assert parse(kind, command, *arguments(config)) == config


def test_the_most_workers_are_planned_for() -> None:
    config = parse(ServeConfig, "serve", "--encoders", "0..4", "--pd-workers", "1..3")
    assert config.counts == WorkerCounts(encoders=4, pd_workers=3)


@pytest.mark.parametrize(
    ("command", "flag", "text", "told"),
    [
        ("serve", "--encoders", "4..2", "--encoders 4..2: the minimum is above the maximum; write 2..4"),
        ("serve", "--pd-workers", "2..0", "--pd-workers 2..0: the minimum is above the maximum; write 1..2"),
        ("serve", "--encoders", "0..65", "--encoders 0..65: at most 64 workers"),
        ("serve", "--pd-workers", "65", "--pd-workers 65: at most 64 workers"),
        ("serve", "--pd-workers", "0..3", "--pd-workers 0..3: the minimum is at least 1; write 1..3"),
        ("serve", "--pd-workers", "0", "--pd-workers 0: at least 1"),
        ("serve", "--encoders", "0..0", "--encoders 0..0: the maximum is at least 1, like 0..1"),
        ("check", "--encoders", "0", "--encoders 0: at least 1; --encoders 0..1 starts one"),
        ("serve", "--encoders", "..4", "like 2, or a range, like 0..4"),
        ("serve", "--encoders", "1...4", "like 2, or a range, like 0..4"),
        ("serve", "--pd-workers", "1-3", "like 2, or a range, like 1..4"),
        ("serve", "--encoders", "-1..4", "like 2, or a range, like 0..4"),
        ("serve", "--encoders", "²..4", "like 2, or a range, like 0..4"),
        ("serve", "--encoders", "1" * 5000, "like 2, or a range, like 0..4"),
    ],
)
def test_what_is_no_range_is_refused_with_the_flag_and_the_remedy(command, flag, text, told):
    with pytest.raises(ConfigError) as refused:
        parse(ServeConfig, command, flag, text)
    assert told in str(refused.value)


@pytest.mark.parametrize("command", ["serve", "check"])
def test_replicas_are_not_scaled(command: str) -> None:
    result = triptych(command, str(DEMO_MODEL), "--topology", "colocated", "--encoders", "0..4")
    assert_refused(result, "--encoders 0..4 is for --topology epd", "--replicas 4")


@pytest.mark.parametrize(
    "given", [("--lora-modules", "sql=/adapters/sql"), ("--speculative-config", '{"method": "ngram"}')]
)
def test_what_vllm_alone_does_is_not_for_replicas(given: tuple[str, str]) -> None:
    result = triptych("serve", str(DEMO_MODEL), "--topology", "colocated", *given)
    assert_refused(result, f"{given[0]} is for --topology epd with --engine vllm", "leave it out")


def test_replicas_have_no_vllm() -> None:
    result = triptych("serve", str(DEMO_MODEL), "--topology", "colocated", "--engine", "vllm")
    assert_refused(result, "--engine vllm is for --topology epd", "leave it out")


def test_pd_workers_with_roles_are_all_planned_for_and_prefill_comes_first() -> None:
    config = parse(ServeConfig, "serve", "--prefill-workers", "1", "--decode-workers", "2")
    assert config.counts.pd_workers == 3
    assert config.pools["pd"] == WorkerRange.fixed(3)
    assert [config.role(number) for number in range(3)] == ["prefill", "decode", "decode"]
    assert config.scaled == {}
    assert parse(ServeConfig, "serve").role(0) == "both"


def test_each_role_that_is_a_range_is_scaled_apart() -> None:
    config = parse(
        ServeConfig, "serve", "--prefill-workers", "1..2", "--decode-workers", "2", "--encoders", "0..1"
    )
    assert config.pools["pd"] == WorkerRange(3, 4)
    assert config.scaled == {"encoder": WorkerRange(0, 1), "pd;role=prefill": WorkerRange(1, 2)}
    assert [config.role(number) for number in range(4)] == ["prefill", "prefill", "decode", "decode"]
    pd = parse(ServeConfig, "serve", "--pd-workers", "1..3", "--encoders", "2")
    assert pd.scaled == {"pd": WorkerRange(1, 3)}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--prefill-workers", "1"), ("--prefill-workers needs --decode-workers too",)),
        (("--decode-workers", "2"), ("--decode-workers needs --prefill-workers too",)),
        (
            ("--prefill-workers", "1", "--decode-workers", "1", "--pd-workers", "2"),
            ("--pd-workers 2", "leave it out"),
        ),
        (
            ("--prefill-workers", "0..2", "--decode-workers", "1"),
            ("--prefill-workers 0..2", "the minimum is at least 1; write 1..2"),
        ),
        (
            ("--prefill-workers", "1", "--decode-workers", "1", "--topology", "colocated"),
            ("--prefill-workers is for --topology epd",),
        ),
    ],
)
@pytest.mark.parametrize("command", ["serve", "check"])
def test_roles_that_cannot_work_together_are_refused(
    command: str, words: tuple[str, ...], told: tuple[str, ...]
) -> None:
    assert_refused(triptych(command, str(DEMO_MODEL), *words), *told)


def test_a_number_outside_of_a_range_is_brought_into_it() -> None:
    assert [WorkerRange(1, 3).clamp(wanted) for wanted in (-1, 0, 2, 9)] == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1048576", 1 << 20), ("512MiB", 512 << 20), ("2g", 2 << 30), ("1.5 KB", 1536), ("0", 0)],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "12 parsecs", "-5MiB", "5MiBB"])
def test_an_invalid_size_is_an_error_that_shows_the_format(text):
    with pytest.raises(ConfigError, match="512MiB"):
        parse_size(text)


def test_sizes_are_shown_in_the_largest_fitting_unit():
    assert [format_size(n) for n in (10, 2048, 3 << 20, 5 << 40)] == [
        "10 B",
        "2.0 KiB",
        "3.0 MiB",
        "5120.0 GiB",
    ]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ScalingConfig(min_encoders=3, max_encoders=2), "--min-encoders 3 is above --max-encoders 2"),
        (ScalingConfig(min_encoders=-1, max_encoders=2), "--min-encoders -1: at least 0"),
        (ScalingConfig(min_pd_workers=0, max_pd_workers=2), "--min-pd-workers 0: at least 1"),
        (ScalingConfig(max_pd_workers=-2), "--max-pd-workers -2"),
        (ScalingConfig(max_encoders=2, encoder_slo=0.0), "--encoder-slo 0"),
        (ScalingConfig(max_encoders=2, encoder_slo=float("nan")), "--encoder-slo nan"),
        (ScalingConfig(max_encoders=2, scale_window=1e9), "--scale-window 1e"),
        (ScalingConfig(scaler_port=8002), "--scaler-port answers with decisions, and none is made"),
    ],
)
def test_what_no_pool_can_be_scaled_by_is_refused_with_the_flag(config: ScalingConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_scaling(config)


@pytest.mark.parametrize(
    ("flags", "patches"), [({}, 512), ({"device": "cuda:1"}, 16384), ({"encoder_batch_patches": 7}, 7)]
)
def test_encoder_batches_are_small_where_a_picture_keeps_the_device_busy(flags, patches):
    assert EncoderConfig(**flags).batch_patches == patches


@pytest.mark.parametrize(
    ("flags", "tokens"), [({}, 512), ({"device": "cuda"}, 8192), ({"max_num_batched_tokens": 7}, 7)]
)
def test_steps_of_a_gpu_have_more_tokens(flags, tokens):
    assert PDConfig(**flags).step_tokens == tokens


def test_a_worker_bound_to_the_network_needs_a_token():
    with pytest.raises(ConfigError, match="--internal-token"):
        check_bind("0.0.0.0", "")
    check_bind("0.0.0.0", "secret")
    check_bind("127.0.0.1", "")


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", ":1"])
def test_an_unreachable_address_is_not_advertised(address):
    with pytest.raises(ConfigError, match="--advertise"):
        check_advertise(address)


def test_the_token_may_come_from_a_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("hush-0123456789a\n")
    assert read_internal_token("", str(path)) == "hush-0123456789a"
    with pytest.raises(ConfigError, match="both set"):
        read_internal_token("x", str(path))
    path.write_text("\n")
    with pytest.raises(ConfigError, match="one line"):
        read_internal_token("", str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_internal_token("", str(tmp_path / "none"))
    path.write_text("hush-012345678\n")
    for token, file in (("hush", ""), ("", str(path))):
        with pytest.raises(ConfigError, match="16 characters") as caught:
            read_internal_token(token, file)
        assert "hush" not in str(caught.value)


def test_a_token_file_has_one_token_or_two_while_it_is_rotated(tmp_path):
    path = tmp_path / "token"
    path.write_text("the-new-token-of-all\n\nthe-old-token-of-all\n")
    assert read_internal_token("", str(path)) == "the-new-token-of-all\nthe-old-token-of-all"
    for content in ("one-token-of-three\n" * 3, "the-new-token-of-all\nshort", "\n"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="--internal-token-file"):
            read_internal_token("", str(path))


ALL = {"tls_cert_file": "c", "tls_key_file": "k", "tls_ca_file": "ca"}


@pytest.mark.parametrize("missing", ALL)
def test_a_flag_that_is_missing_is_named(missing: str) -> None:
    flags = {name: value for name, value in ALL.items() if name != missing}
    with pytest.raises(ConfigError, match=f"needs --{missing.replace('_', '-')} too"):
        internal_tls(EncoderConfig(**flags))
    assert internal_tls(EncoderConfig()) is None
    found = internal_tls(EncoderConfig(**ALL))
    assert found is not None and (found.cert, found.key, found.ca) == ("c", "k", "ca")
    with pytest.raises(ConfigError, match="--http-cert-file needs --http-key-file too"):
        front_door_tls(ProxyConfig(http_cert_file="c"))


def test_the_name_of_the_services_is_not_left_out() -> None:
    with pytest.raises(ConfigError, match="--tls-name"):
        internal_tls(EncoderConfig(**ALL, tls_name=""))


def test_workers_talk_to_other_machines_by_tls_or_as_they_are_told() -> None:
    with pytest.raises(ConfigError, match="--tls-cert-file.*--insecure"):
        check_worker_encryption("0.0.0.0", EncoderConfig())
    check_worker_encryption("127.0.0.1", EncoderConfig())
    check_worker_encryption("0.0.0.0", EncoderConfig(**ALL))
    check_worker_encryption("0.0.0.0", EncoderConfig(insecure=True))


def test_a_front_door_in_clear_text_says_what_it_shows() -> None:
    with pytest.raises(ConfigError, match="shows API keys, prompts.*--http-cert-file.*--insecure"):
        check_front_encryption(ProxyConfig(host="0.0.0.0", api_key_file="keys"))
    with pytest.raises(ConfigError, match="shows prompts"):
        check_front_encryption(ProxyConfig(host="0.0.0.0", **ALL))
    check_front_encryption(ProxyConfig())
    check_front_encryption(ProxyConfig(host="0.0.0.0", insecure=True))
    check_front_encryption(ProxyConfig(host="0.0.0.0", http_cert_file="c", http_key_file="k"))


def test_workers_have_the_tls_of_their_cluster() -> None:
    flags = with_tls_of(EncoderConfig(), ProxyConfig(**ALL, tls_name="n", insecure=True))
    assert internal_tls(flags) == internal_tls(EncoderConfig(**ALL, tls_name="n")) and flags.insecure
