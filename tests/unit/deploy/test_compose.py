"""deploy/compose.yaml: valid by a strict schema, and its commands are ones that the code takes."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from support.kubernetes.chart import ROOT
from support.options import parse
from triptych.base.config import EncoderConfig, PDConfig, ProxyConfig, check_advertise, check_front_door
from triptych.base.config.flags import Config
from triptych.base.config.tls import check_front_encryption, check_worker_encryption
from triptych.store.address import parse_store_url

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
CONFIGS: dict[str, type[Config]] = {"proxy": ProxyConfig, "encoder": EncoderConfig, "pd": PDConfig}
WORDS = {"type": "array", "items": {"type": "string"}}
SIZE = {"type": "string", "pattern": "^[0-9]+[kmg]$"}
SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": [
        "image",
        "command",
        "user",
        "read_only",
        "cap_drop",
        "security_opt",
        "networks",
        "mem_limit",
    ],
    "properties": {
        "image": {"type": "string"},
        "command": {"anyOf": [WORDS, {"type": "string"}]},
        "restart": {"enum": ["unless-stopped"]},
        "user": {"type": "string", "pattern": "^[1-9][0-9]*:[1-9][0-9]*$"},
        "read_only": {"const": True},
        "cap_drop": {"const": ["ALL"]},
        "security_opt": {"const": ["no-new-privileges:true"]},
        "tmpfs": WORDS,
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
        "secrets": WORDS,
        "ports": {"type": "array", "items": {"type": "string", "pattern": r"^127\.0\.0\.1:\d+:\d+$"}},
        "stop_grace_period": {"type": "string", "pattern": "^[0-9]+s$"},
        "mem_limit": SIZE,
        "depends_on": WORDS,
        "networks": WORDS,
    },
}
SCHEMA = Draft202012Validator(
    {
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {"^x-": {}},
        "properties": {
            "name": {"type": "string"},
            "services": {"type": "object", "additionalProperties": SERVICE},
            "networks": {
                "type": "object",
                "additionalProperties": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"internal": {"type": "boolean"}},
                },
            },
            "secrets": {
                "type": "object",
                "additionalProperties": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["environment"],
                    "properties": {"environment": {"type": "string"}},
                },
            },
        },
    }
)
SERVICES = COMPOSE["services"]


def config_of(service: str) -> Any:
    command, *words = shlex.split(SERVICES[service]["command"])
    assert command == service
    return parse(CONFIGS[service], service, *words)


def test_the_file_is_valid() -> None:
    SCHEMA.validate(COMPOSE)


@pytest.mark.parametrize("service", CONFIGS)
def test_the_code_takes_every_command(service: str) -> None:
    config = config_of(service)
    assert parse_store_url(config.store).host == "store"
    assert config.internal_token_file == "/run/secrets/internal-token"
    if service == "proxy":
        check_front_encryption(config)
        check_front_door(config.host, api_key="", api_key_file="", auth=config.auth)
        published = [int(port.rsplit(":", 1)[1]) for port in SERVICES[service]["ports"]]
        assert published == [config.port, config.grpc_port]
    else:
        check_worker_encryption(config.host, config)
        check_advertise(config.advertise)
        assert config.advertise == f"{service}:{config.port}"


@pytest.mark.parametrize("service", CONFIGS)
def test_a_service_may_finish_what_it_holds(service: str) -> None:
    seconds = int(SERVICES[service]["stop_grace_period"].removesuffix("s"))
    assert seconds >= config_of(service).drain_timeout + 15


def test_proxies_alone_are_connected_with_the_outside() -> None:
    assert COMPOSE["networks"]["inside"]["internal"] is True
    assert [name for name, one in SERVICES.items() if "outside" in one["networks"]] == ["proxy"]


def test_the_store_is_set_up_as_the_chart_does() -> None:
    words = SERVICES["store"]["command"]
    assert words[words.index("--maxmemory-policy") + 1] == "volatile-lru"
    assert words[words.index("--save") + 1] == ""
