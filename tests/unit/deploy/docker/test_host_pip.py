"""The building machine's pip settings as mounts."""

from __future__ import annotations

from pathlib import Path

from deploy.docker.host_pip import local_paths, settings

LISTING = r"""
:env:.cert='/certs/ours.crt'
:env:.default-timeout='180'
:env:.disable-pip-version-check='1'
global.cert='/certs/theirs.crt'
global.extra-index-url='file:///mirror/simple https://mirror.example/simple'
global.find-links='/wheels\nfile:///more%20wheels'
install.user='true'
"""


def test_only_what_says_where_packages_come_from_is_taken_and_a_variable_wins():
    found = settings(LISTING)
    assert found == {
        "cert": "/certs/ours.crt",
        "timeout": "180",
        "extra-index-url": "file:///mirror/simple https://mirror.example/simple",
        "find-links": "/wheels\nfile:///more%20wheels",
    }
    assert settings("\n".join(reversed(LISTING.splitlines())))["cert"] == "/certs/ours.crt"


def test_every_local_folder_is_mounted_and_an_index_with_the_files_beside_it():
    expected = {"/certs/ours.crt", "/mirror", "/wheels", "/more wheels"}
    assert set(local_paths(settings(LISTING))) == {Path(path) for path in expected}
