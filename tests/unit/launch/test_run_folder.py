from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from triptych.apps.launch.cluster_state import run_folder
from triptych.base.errors import ConfigError


def test_a_folder_of_a_running_cluster_is_refused_and_free_after_its_end(tmp_path: Path) -> None:
    wanted = str(tmp_path / "run")
    with run_folder(wanted) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(ConfigError, match=r"--run-dir .*/run is in use by another"), run_folder(wanted):
            pass
    with run_folder(wanted) as again:
        assert again == folder


def test_a_folder_of_a_cluster_that_was_killed_is_free(tmp_path: Path) -> None:
    held = f"from triptych.apps.launch.cluster_state import run_folder\nwith run_folder({str(tmp_path)!r}):\n"
    program = [sys.executable, "-c", held + "    print(flush=True); input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ConfigError, match="in use"), run_folder(str(tmp_path)):
            pass
        other.kill()
        other.wait()
        with run_folder(str(tmp_path)) as folder:
            assert folder == tmp_path


def test_a_new_folder_goes_at_the_end_and_a_named_one_stays(tmp_path: Path) -> None:
    with run_folder("") as new:
        assert new.is_dir()
    assert not new.exists()
    with run_folder(str(tmp_path)) as named:
        pass
    assert named.is_dir()


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wanted = str(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="--run-dir .* cannot be used"), run_folder(wanted):
        pass
