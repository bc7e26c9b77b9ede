"""What disaggregation is worth: equal devices, unequal ones, reuse, and published comparisons, simulated.

    python -m benchmarks when_to_disaggregate --write
    python -m benchmarks when_to_disaggregate reports --write

A part that is named is made again, the others stay as the page has them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from benchmarks.result_page import RESULTS, add_write_flag, publish
from benchmarks.when_to_disaggregate import devices, plots, reports, reuse
from triptych.simulator.run import NOT_MODELLED

PAGE = RESULTS / "when_to_disaggregate.md"
_HEAD = """\
# What disaggregation is worth, simulated

Command: `python -m benchmarks when_to_disaggregate --write` (a part by its name). Virtual time, costs by
roofline and published figures, not measured. Not modelled: {}.
What it means: [docs](../../docs/when-to-disaggregate.md).
"""


def _reports() -> list[str]:
    lines = [
        "| | requests/s | mean TTFT, TPOT, ms | P99 TTFT, TPOT, ms | P50, P90, P99 of a request, ms |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| vllm#41567: {name} | {_cells(one)}" for name, one in reports.vllm().items()]
    lines += [f"| llm-d: {name} | {_cells(one)}" for name, one in reports.kimi().items()]
    for (name, rate), one in reports.lmsys().items():
        lines.append(f"| LMSYS: {name} at {rate:g}/s | {_cells(one)}")
    return lines


def _cells(one: reports.Found) -> str:
    ends = ", ".join(f"{value:.0f}" for value in (one.p50, one.p90, one.p99))
    means = f"{one.ttft:.0f}, {one.tpot:.1f}"
    return f"{one.rate:.2f} | {means} | {one.p99_ttft:.0f}, {one.p99_tpot:.0f} | {ends} |"


def _equal() -> list[str]:
    found = list(devices.plans())
    plots.draw_equal(found)
    return devices.equal_table(found)


def _devices() -> list[str]:
    plots.draw_devices()
    return [*devices.table(), "", "Whole devices, simulated:", "", *devices.checks()]


def _reuse() -> list[str]:
    found = list(reuse.points())
    plots.draw_reuse(found)
    return reuse.table(found)


PARTS: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "equal": ("Four A100, all ways", _equal),
    "devices": ("The price, in PD devices, below which an encoder device pays", _devices),
    "reuse": ("Pictures shown before", _reuse),
    "reports": ("Published comparisons", _reports),
}


def _marks(part: str) -> tuple[str, str]:
    return f"<!-- {part}: begin -->\n", f"<!-- {part}: end -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all of them")
    add_write_flag(parser, PAGE)
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}: use {', '.join(PARTS)}")
    for part in options.parts or PARTS:
        began = time.process_time()
        lines = PARTS[part][1]()
        spent = f"{time.process_time() - began:.0f} s of CPU time."
        text = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else _empty()
        begin, end = _marks(part)
        head, rest = text.split(begin)
        body = "\n".join([*lines, "", spent, ""])
        publish(head + begin + body + end + rest.split(end)[1], PAGE, write=options.write)
    return 0


def _empty() -> str:
    sections = (f"\n## {title}\n\n{''.join(_marks(part))}" for part, (title, _) in PARTS.items())
    return _HEAD.format(NOT_MODELLED) + "".join(sections)


if __name__ == "__main__":
    raise SystemExit(main())
