"""Misspelt variables are named in a warning; others are not."""

from __future__ import annotations

import pytest

from triptych.apps.cli import main
from triptych.apps.cli.app import app
from triptych.apps.cli.variables import misspelt, variables_of
from triptych.base.parent import CAUSE_VARIABLE, PARENT_VARIABLE

KNOWN = frozenset(variables_of(app))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("TRIPTYCH_PROT", "TRIPTYCH_PORT"),
        ("TRIPTYCH_ENCODER", "TRIPTYCH_ENCODERS"),
        ("TRIPTYCH_API_KEYS_FILE", "TRIPTYCH_API_KEY_FILE"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_one_that_is_meant(written: str, meant: str) -> None:
    assert misspelt({written: "1", "HOME": "/"}, KNOWN) == [(written, meant)]


def test_variables_of_ours_of_services_and_of_others_are_not_misspelt() -> None:
    # Kubernetes and Docker give the containers beside a service `triptych` its address.
    links = ("TRIPTYCH_SERVICE_HOST", "TRIPTYCH_SERVICE_PORT", "TRIPTYCH_PORT_8000_TCP_ADDR")
    others = ("TRIPTYCH_SERVICE", CAUSE_VARIABLE, "TRIPTYCH_MODEL", "TRIPTYCHS_PORT", "TRIPTYCH_HOME")
    assert misspelt(dict.fromkeys((*links, *others), ""), KNOWN) == []


def test_a_child_process_does_not_warn_again_as_its_parent_did() -> None:
    assert misspelt({"TRIPTYCH_PROT": "1", PARENT_VARIABLE: "1"}, KNOWN) == []


def test_the_command_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIPTYCH_PROT", "9000")
    monkeypatch.setattr("sys.argv", ["triptych", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert "TRIPTYCH_PROT does nothing: did you mean TRIPTYCH_PORT?" in printed.err
    assert printed.out.startswith("triptych ") and not ended.value.code
