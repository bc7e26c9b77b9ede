"""What `python -m benchmarks` says and runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.micro import __main__ as micro
from benchmarks.programs import listing, programs, run

FOLDER = Path(command.__file__).parent


def test_it_begins_with_what_a_newcomer_runs_before_the_targets(capsys):
    assert command.main([]) == 0
    output = capsys.readouterr().out
    assert output.index("triptych bench goodput --launch") < output.index("target ")


@pytest.mark.parametrize("folder", [FOLDER, FOLDER / "micro"])
def test_every_program_is_listed_with_a_sentence(folder):
    lines = listing(folder).splitlines()
    assert len(lines) == len(programs(folder)) > 3
    assert all(line.split(maxsplit=1)[1] for line in lines)


def test_small_programs_have_one_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["micro"])
    assert micro.main() == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [
        "attention_reading",
        "hot_paths",
        "serve_start",
        "shared_prefixes",
        "vllm_paths",
    ]


def test_a_name_that_is_none_is_refused_with_those_that_are(capsys):
    assert command.main(["vllm_fleet"]) == 2
    assert "no benchmark 'vllm_fleet': use one of against_peer" in capsys.readouterr().err


def test_a_program_runs_with_the_words_behind_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.programs._ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sample_program.py").write_text("import sys\n\ndef main():\n    return len(sys.argv)\n")
    monkeypatch.setattr(sys, "argv", [])
    assert run(tmp_path, ["sample_program", "--one", "--two"], "python -m x") == 3
    assert sys.argv == ["python -m x sample_program", "--one", "--two"]
