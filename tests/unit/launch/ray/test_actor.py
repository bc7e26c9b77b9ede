"""Where an actor's service listens, and what is said of one that cannot work."""

from __future__ import annotations

import socket

import pytest

from triptych.apps.launch.ray.actor import free_port_in, is_free, last_error, listen_at


def test_a_worker_listens_on_all_interfaces_and_names_its_node():
    words, address = listen_at("10.0.0.7", 20001)
    assert words == ["--host", "0.0.0.0", "--port", "20001", "--advertise", "10.0.0.7:20001"]
    assert address == "10.0.0.7:20001"


def test_a_free_port_is_one_of_the_range_that_nothing_listens_at():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(OSError, match=f"no port of {port}-{port} is free"):
            free_port_in(f"{port}-{port}")
    assert 20000 <= free_port_in("20000-29999") <= 29999


def test_the_reason_is_the_last_that_a_service_said(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "other\ntriptych: the first\n" + "x" * 5000 + "\ntriptych: --store is missing\nTraceback\n"
    )
    assert last_error(log) == "--store is missing"
    log.write_text("nothing of ours\n")
    assert last_error(log) == last_error(tmp_path / "none") == "its log says why"


def test_the_reason_is_found_in_a_log_of_json_too(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        '{"level": "info", "logger": "launch", "message": "starting"}\n'
        '{"level": "critical", "logger": "triptych", "message": "--store is missing"}\n'
        '{"level": "info", "logger": "launch", "message": "stopped"}\n'
        "{half of a line\n"
    )
    assert last_error(log) == "--store is missing"
