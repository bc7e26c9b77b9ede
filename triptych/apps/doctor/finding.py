"""What one check has found, and the table of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from triptych.base.errors import ConfigError, printable


class CheckOutcome(StrEnum):
    """How a check went. A note is for people to judge; it fails nothing."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line: what was checked and what was found; `remedy` says what to do, `details` are lines below."""

    check: str
    found: str
    verdict: CheckOutcome = CheckOutcome.OK
    remedy: str = ""
    details: tuple[str, ...] = ()


#: A heading and its results.
Group = tuple[str, Sequence[CheckResult]]


def ok(check: str, text: str) -> CheckResult:
    return CheckResult(check, text)


def note(check: str, text: str, remedy: str = "") -> CheckResult:
    return CheckResult(check, text, CheckOutcome.NOTE, remedy)


def fail(check: str, text: str, remedy: str) -> CheckResult:
    return CheckResult(check, text, CheckOutcome.FAIL, remedy)


def fail_of(check: str, error: ConfigError) -> CheckResult:
    """The failure that an error tells: it names the flag and, after a colon, the remedy."""
    line = str(error).partition("\n")[0]
    colon = _first_colon(line)
    return fail(check, line[:colon], line[colon + 2 :] or "see the flag's --help")


def _first_colon(line: str) -> int:
    """Where the reason ends: at the first colon that is not in brackets, which hold another's words."""
    depth = 0
    for place, character in enumerate(line):
        depth += (character in "([{") - (character in ")]}")
        if depth <= 0 and line.startswith(": ", place):
            return place
    return len(line)


def table(groups: Iterable[Group]) -> str:
    """The findings under their headings, each remedy below its line, and a last line with the counts."""
    groups = [(heading, findings) for heading, findings in groups if findings]
    everything = [finding for _, findings in groups for finding in findings]
    width = max((len(finding.check) for finding in everything), default=0)
    lines: list[str] = []
    for heading, findings in groups:
        lines.append(heading)
        for finding in findings:
            lines.append(f"  {finding.verdict:<4}  {finding.check:<{width}}  {_one_line(finding.found)}")
            lines += [f"        {'':<{width}}  {detail}" for detail in finding.details]
            if finding.remedy:
                lines.append(f"        {'':<{width}}  -> {_one_line(finding.remedy)}")
    counts = {verdict: sum(1 for one in everything if one.verdict is verdict) for verdict in CheckOutcome}
    lines.append(
        f"{counts[CheckOutcome.FAIL]} of {len(everything)} checks failed, {counts[CheckOutcome.NOTE]} notes"
    )
    return "\n".join(lines) + "\n"


def failed(groups: Iterable[Group]) -> bool:
    """Whether any check has failed."""
    return any(finding.verdict is CheckOutcome.FAIL for _, findings in groups for finding in findings)


def _one_line(text: str) -> str:
    """Texts come from servers and files, too: nothing in them ends the line or moves the cursor."""
    return printable(" ".join(text.split()))
