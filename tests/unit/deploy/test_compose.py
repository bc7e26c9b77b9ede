"""deploy/compose.yaml: valid by a strict schema, and its commands are ones that the code takes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from support.kubernetes.chart import ROOT
from support.options import parse, triptych
from triptych.base.config import EncoderConfig, PDConfig, ProxyConfig, check_advertise, check_front_door
from triptych.base.config.flags import Config
from triptych.base.config.tls import TlsFiles, check_front_encryption, check_worker_encryption, internal_tls
from triptych.base.rpc.tls.material import read_material
from triptych.integrations.vllm.options import parse_options
from triptych.pd_worker.vllm.connection import check_engine

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
CONFIGS: dict[str, type[Config]] = {"proxy": ProxyConfig, "encoder": EncoderConfig, "pd": PDConfig}
WORDS = {"type": "array", "items": {"type": "string"}}
SIZE = {"type": "string", "pattern": "^[0-9]+[kmg]$"}
SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image", "command", "user", "read_only", "cap_drop", "security_opt", "mem_limit"],
    "oneOf": [{"required": ["networks"]}, {"required": ["network_mode"]}],
    "properties": {
        "image": {"type": "string"},
        "command": {"anyOf": [WORDS, {"type": "string"}]},
        "restart": {"enum": ["unless-stopped", "no"]},
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
        "volumes": WORDS,
        "entrypoint": WORDS,
        "deploy": {"type": "object", "required": ["resources"]},
        "shm_size": SIZE,
        "network_mode": {"const": "service:pd"},
        "depends_on": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "required": ["condition"],
                "properties": {"condition": {"enum": ["service_started", "service_completed_successfully"]}},
            },
        },
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
            "volumes": {
                "type": "object",
                "additionalProperties": {"propertyNames": {"const": "driver_opts"}},
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
    files = ("/certificates/cert.pem", "/certificates/key.pem", "/certificates/ca.pem")
    assert internal_tls(config) == TlsFiles(*files, config.tls_name)
    assert config.store == "rediss://store:6379/0"
    assert (config.store_cert_file, config.store_key_file, config.store_ca_file) == files
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


def test_all_that_read_the_certificates_wait_until_they_are_made(tmp_path: Path) -> None:
    """The command makes the files that the flags name, for the store's host and for the services' name."""
    command, folder, *options = shlex.split(SERVICES["certificates"]["command"])
    assert command == "cert" and SERVICES["certificates"]["volumes"] == [f"certificates:{folder}"]
    triptych(command, str(tmp_path), *options)
    files = [str(tmp_path / name) for name in ("cert.pem", "key.pem", "ca.pem")]
    for name in ("store", EncoderConfig().tls_name):
        read_material(TlsFiles(*files, name))
    for name, one in SERVICES.items():
        if name != "certificates":
            assert one["volumes"] == [f"certificates:{folder}:ro"]
            assert one["depends_on"]["certificates"]["condition"] == "service_completed_successfully"
            # The key is for its owner alone.
            assert one["user"] == SERVICES["certificates"]["user"]


def test_the_store_is_set_up_as_the_chart_does() -> None:
    words = SERVICES["store"]["command"]
    assert words[words.index("--maxmemory-policy") + 1] == "volatile-lru"
    assert words[words.index("--save") + 1] == ""


def with_vllm() -> dict[str, Any]:
    """Both files as Compose merges them: mappings by key, lists one after the other, but for commands."""

    def merged(one: Any, other: Any, key: str = "") -> Any:
        if isinstance(one, dict) and isinstance(other, dict):
            return one | {name: merged(one.get(name), value, name) for name, value in other.items()}
        return one + other if isinstance(one, list) and key not in ("command", "entrypoint") else other

    found: dict[str, Any] = merged(COMPOSE, yaml.safe_load((ROOT / "deploy/compose.vllm.yaml").read_text()))
    return found


def test_with_vllm_the_file_is_valid_and_the_code_takes_its_commands() -> None:
    found = with_vllm()
    SCHEMA.validate(found)
    for service in ("encoder", "pd"):
        command, *words = shlex.split(found["services"][service]["command"])
        config = parse(CONFIGS[service], command, *words)
        assert (config.model, config.dtype) == ("/model", "bfloat16")
        check_worker_encryption(config.host, config)
        own = config_of(service)
        assert all(
            getattr(config, name) == getattr(own, name)
            for name in (
                "host",
                "port",
                "advertise",
                "metrics_port",
                "store",
                "tls_ca_file",
                "store_key_file",
            )
        )
    check_engine(config)


def test_what_is_written_into_memory_is_there_for_its_reader() -> None:
    """A volume in memory is empty again once nobody has it: a service that stays has it before its writer."""
    found = with_vllm()
    services, held = found["services"], False
    for volume, options in found["volumes"].items():
        if (options or {}).get("driver_opts", {}).get("type") != "tmpfs":
            continue
        users = {
            name: one
            for name, one in services.items()
            if any(mount.startswith(f"{volume}:") for mount in one["volumes"])
        }
        for name in [name for name, one in users.items() if one["restart"] == "no"]:
            (before,) = set(services[name]["depends_on"]) & set(users)
            assert services[before]["restart"] == "unless-stopped"
            held = True
    assert held


def test_the_connector_takes_what_the_first_service_writes(tmp_path: Path) -> None:
    vllm, namespace = (with_vllm()["services"][name] for name in ("vllm", "namespace"))
    (tmp_path / "triptych").write_text("#!/bin/sh\nprintf " + "a1" * 32)
    (tmp_path / "triptych").chmod(0o755)
    (script,) = (word.replace("$$", "$").replace("/engine", str(tmp_path)) for word in namespace["command"])
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([*namespace["entrypoint"], script], env=path, check=True, timeout=30)
    transfer = json.loads((tmp_path / "ec-transfer.json").read_text())
    given = transfer["ec_connector_extra_config"]
    for kind in ("store", "tls"):
        files = [given.pop(f"{kind}_{name}_file") for name in ("cert", "key", "ca")]
        assert files == ["/certificates/cert.pem", "/certificates/key.pem", "/certificates/ca.pem"]
    assert given.pop("internal_token_file") == f"/run/secrets/{vllm['secrets'][0]}"
    options = parse_options(given)
    assert options.store == "rediss://store:6379/0"
    assert list(options.namespaces) == ["a1" * 32]
    assert (transfer["ec_connector"], transfer["ec_role"]) == ("TriptychECConnector", "ec_consumer")
    mounts = [volume.removesuffix(":ro").rpartition(":")[2] for volume in vllm["volumes"]]
    assert mounts == ["/certificates", "/model", "/engine"]
