"""The folder for temporary files."""

from __future__ import annotations

import tempfile

import pytest

from triptych.base.errors import ConfigError
from triptych.base.machine.resources import check_temporary_folder


def test_where_temporary_files_can_be_written_all_is_well():
    check_temporary_folder()


def test_a_read_only_root_without_a_tmp_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    with pytest.raises(ConfigError, match="--tmpfs /tmp.*emptyDir.*TMPDIR"):
        check_temporary_folder()
