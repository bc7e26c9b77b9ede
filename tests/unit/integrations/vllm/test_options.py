"""The options in vLLM's `ec_connector_extra_config`."""

from __future__ import annotations

import pytest

from triptych.base.errors import ConfigError
from triptych.integrations.vllm.options import parse_options
from triptych.store.topology.location import parse_store

NAMESPACE = "a1" * 32
NEEDED = {"store": "redis://store:6379/0", "namespace": NAMESPACE}


def test_a_store_and_a_namespace_are_enough():
    options = parse_options(NEEDED)
    assert options.store == "redis://store:6379/0"
    assert options.namespaces == (NAMESPACE,)
    assert (options.wait_seconds, options.media_wait_seconds, options.ttl_seconds) == (30.0, 1.0, 3600.0)
    assert (options.host_memory_bytes, options.host_folder, options.row_width) == (1 << 30, "/dev/shm", 0)


def test_every_option_can_be_set():
    options = parse_options(
        NEEDED
        | {
            "namespace": [NAMESPACE, "b2" * 32],
            "wait_seconds": 5,
            "media_wait_seconds": 0.5,
            "host_memory_bytes": 1 << 21,
            "host_folder": "/run/shm",
            "ttl_seconds": 60,
            "row_width": 1024,
            "ends_with_parent": True,
            "trusted_front_door": True,
        }
    )
    assert options.namespaces == (NAMESPACE, "b2" * 32)
    assert (options.wait_seconds, options.media_wait_seconds, options.ttl_seconds) == (5, 0.5, 60)
    assert (options.host_memory_bytes, options.host_folder, options.row_width) == (1 << 21, "/run/shm", 1024)
    assert options.trusted_front_door and not parse_options(NEEDED).trusted_front_door
    assert options.ends_with_parent and not parse_options(NEEDED).ends_with_parent


def test_the_stores_password_comes_from_a_file_and_is_never_shown(tmp_path):
    file = tmp_path / "password"
    file.write_text("s3cret\n")
    options = parse_options(NEEDED | {"store_password_file": str(file)})
    assert parse_store(options.store).servers[0].password == "s3cret"
    assert "s3cret" not in repr(options)


@pytest.mark.parametrize(
    "given,said",
    [
        ({"store": ""}, "no store: give the store's address"),
        ({"store": "http://store"}, "unsupported scheme"),
        ({"store": 5}, "store must be a text"),
        ({"namespace": "tiny"}, "64 hex characters"),
        ({"namespace": []}, "64 hex characters"),
        ({"namespace": None}, "64 hex characters"),
        ({"namespace": [NAMESPACE, 5]}, "64 hex characters"),
        ({"wait_seconds": -1}, "wait_seconds must be a number from 0"),
        ({"wait_seconds": "5"}, "wait_seconds must be a number"),
        ({"wait_seconds": float("nan")}, "wait_seconds must be a number"),
        ({"host_memory_bytes": 5}, "host_memory_bytes must be a number from"),
        ({"ttl_seconds": True}, "ttl_seconds must be a number"),
        ({"store_password_file": "/nowhere"}, "store_password_file /nowhere cannot be read"),
        ({"store_ca_file": "/nowhere"}, "ca_file|--store-ca-file"),
        (
            {"shared_storage_path": "/tmp"},
            "no option 'shared_storage_path': use store, store_file, namespace",
        ),
    ],
)
def test_a_bad_option_is_an_error_that_names_it(given, said):
    with pytest.raises(ConfigError, match=said) as raised:
        parse_options(NEEDED | given)
    assert str(raised.value).startswith("ec_connector_extra_config")
