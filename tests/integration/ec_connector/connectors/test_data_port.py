"""The port at which encoder workers give rows to other machines: who gets nothing from it."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trustme

from support.certificates import CertificateFolder, issue, pem_of
from support.data.items import make_plan
from support.engine.direct_pair import NOWHERE, entry, opened
from triptych.base.config.tls import TlsFiles
from triptych.base.types import EmbeddingSource
from triptych.ec_connector.connectors import output_server
from triptych.store.sockets import command


def made_files(folder: Path) -> TlsFiles:
    authority = trustme.CA()
    return CertificateFolder(folder).write(issue(authority), pem_of(authority)).internal


def answer_of(source: EmbeddingSource, sent: bytes) -> bytes:
    host, port = source.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(sent)
        try:
            return sock.recv(1000)
        except ConnectionResetError:
            return b""


def test_the_data_port_speaks_mutual_tls_and_wants_the_token(tmp_path: Path) -> None:
    item, files = entry(make_plan("tls", rows=300, width=1024)), made_files(tmp_path / "ours")
    with opened(NOWHERE, token="secret", tls=files) as pair:
        source = replace(pair.offer(item), socket="")
        assert pair.fetch(item.plan, source).paths == {item.plan.mm_hash: "peer"}
        assert torch.equal(pair.move(item.plan), item.data)
        assert b"$" not in answer_of(source, command("GET", source.name))
        for token, theirs in (("another", files), ("secret", made_files(tmp_path / "theirs"))):
            with opened(NOWHERE, token=token, tls=theirs) as stranger:
                assert stranger.fetch(item.plan, source).missing


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"*2\r\n$9999999999\r\n", b"*9\r\n", b"\0" * 10000, b""]
)
def test_a_stranger_gets_nothing_from_the_data_port_without_the_token(sent: bytes) -> None:
    with opened(NOWHERE, token="secret") as pair:
        source = pair.offer(entry(make_plan("port")))
        answer = answer_of(source, sent or command("GET", source.name))
        assert answer in (b"", b"-ERR not allowed\r\n")


def test_a_wrong_token_ends_its_connection(monkeypatch) -> None:
    """Else whoever guesses again and again would keep a place for ever."""
    monkeypatch.setattr(output_server, "LOGIN_SECONDS", 600.0)
    with opened(NOWHERE, token="secret") as pair:
        host, port = pair.offer(entry(make_plan("guess"))).address.split(":")
        with socket.create_connection((host, int(port)), 20) as stranger, stranger.makefile("rb") as replies:
            stranger.sendall(command("AUTH", "guess"))
            assert replies.read() == b"-WRONGPASS not the cluster's internal token\r\n"


def test_a_stranger_who_says_nothing_is_closed_and_a_known_reader_stays(monkeypatch) -> None:
    monkeypatch.setattr(output_server, "LOGIN_SECONDS", 0.05)
    with opened(NOWHERE, token="secret") as pair:
        item = entry(make_plan("silent", rows=7))
        source = pair.offer(item)
        host, port = source.address.split(":")
        with socket.socket(socket.AF_UNIX) as known:
            known.settimeout(20)
            known.connect(f"\0{source.socket}")
            for _ in range(2):  # each as long as a login may take
                with socket.create_connection((host, int(port)), 20) as stranger:
                    assert stranger.recv(1) == b""
            known.sendall(command("GET", "f" * 64))
            assert known.recv(16) == b"$-1\r\n"
