"""The commands: what cannot work ends in one sentence and exit code 2."""

from __future__ import annotations

import socket

import pytest
from click.testing import CliRunner

from support.options import assert_refused, triptych
from triptych.apps.cli.app import app
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.base.config import ClusterConfig, EncoderConfig, PDConfig, ProxyConfig, ServeConfig
from triptych.base.config.flags import flags_of


@pytest.mark.parametrize("command", ["serve", "proxy", "encoder", "pd", "check"])
def test_every_flag_of_a_service_is_in_its_help_with_its_variable(command):
    configs = {"proxy": ProxyConfig, "encoder": EncoderConfig, "pd": PDConfig, "serve": ServeConfig}
    config = configs.get(command, ClusterConfig)
    text = CliRunner().invoke(app, [command, "--help"]).output
    for flag in flags_of(config):
        assert flag.option in text or flag.negation in text
        assert f"TRIPTYCH_{flag.name.upper()}" in text.replace("\n", " ").replace(" " * 34, "")


def test_a_missing_model_folder_is_a_clear_error():
    assert_refused(
        triptych("serve", "/no/such/folder"), "MODEL=/no/such/folder does not exist", "MODEL=/folder"
    )


@pytest.mark.parametrize("command", ["serve", "check", "profile"])
def test_a_device_that_is_not_served_is_a_clear_error(command):
    refused = triptych(command, "--device", "xpu")
    assert_refused(refused, "--device", "cpu, cuda or cuda:N")
    assert "Traceback" not in refused.stderr


def test_a_folder_without_a_config_is_a_clear_error(tmp_path):
    assert_refused(triptych("serve", str(tmp_path)), "config.json", "safetensors")


def test_a_port_in_use_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_refused(
            triptych("serve", str(DEMO_MODEL), "--port", str(port)), f"--port {port}", "picks another"
        )


def test_a_service_alone_needs_a_store():
    assert_refused(triptych("proxy"), "--store")
    assert_refused(triptych("encoder"), "--store")


def test_memory_that_does_not_fit_is_an_error_with_the_sum():
    result = triptych("serve", str(DEMO_MODEL), "--kv-memory", "900TiB", "--port", "0", "--grpc-port", "0")
    assert_refused(result, "needs", "are available", "--kv-memory", "together")


@pytest.mark.parametrize("command", ["serve", "check"])
def test_ranks_where_there_can_be_none_are_refused_by_an_error(command: str):
    words = (command, str(DEMO_MODEL), "--tensor-parallel", "2")
    assert_refused(triptych(*words, "--topology", "colocated"), "--tensor-parallel 2", "--topology epd")


def test_heads_that_cannot_be_divided_among_the_ranks_are_an_error_that_names_what_can():
    refused = triptych("check", str(DEMO_MODEL), "--tensor-parallel", "7")
    assert_refused(refused, "attention heads", "7 ranks", "give --tensor-parallel one of 1")


def test_a_proxy_open_to_the_network_needs_api_keys_or_a_flag_that_allows_it_without(tmp_path):
    store = ("--store", "redis://127.0.0.1:1/0", "--host", "0.0.0.0")
    assert_refused(triptych("proxy", *store), "--api-key-file", "--no-auth", "127.0.0.1")
    assert_refused(triptych("serve", str(DEMO_MODEL), "--host", "0.0.0.0"), "--api-key-file", "--no-auth")
    missing = tmp_path / "keys"
    assert_refused(
        triptych("proxy", *store, "--api-key-file", str(missing)), "--api-key-file", "cannot be read"
    )
