"""What prefill up to the first missing item is worth: in the simulator, or live on this machine.

    python -m benchmarks overlap_prefill [--requests 400] [--write]
    python -m benchmarks overlap_prefill --live [MODEL] [--rounds 30] [--side 448] [--write]

Requests have four pictures each and meet two encoders and a PD worker.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics

from benchmarks.overlap_prefill import live, simulated
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.goodput.report.machine import chip, commit

SIMULATED, LIVE = RESULTS / "overlap_prefill.md", RESULTS / "overlap_prefill_live.md"

_ABOUT = (
    "Mean time to first token with `--overlap-prefill` by that without. Four new pictures in a request,",
    "two encoders, one PD worker, one picture in a batch of the tower. The ratio is the prefill time of a",
    "whole prompt by the encode time of one picture; the tower's costs are scaled to it. `bare`: costs of",
    "which tower and prefill are nearly all. `a100`: the roofline of `triptych plan --gpu a100`, with",
    "saves, loads and step overhead. Neither was measured. What decides is the product's own code.",
)
_WHEN = (
    "It pays most where a prompt's prefill takes about as long as the encoding that it waits for, and at",
    "low load. It stops paying where one of the two is nearly all there is, and where queues are: a full",
    "PD worker has no step to spare, and before full encoders the wait for the first picture is the long",
    "one. A lone step is made for a sixteenth of the step's budget or more: fewer tokens cost more than",
    "they save when an item comes while the step lasts.",
)


def simulated_page(count: int) -> str:
    bare, device = simulated.bare(), simulated.published("a100")
    lines = [
        "# Prefill while other items are encoded: simulated",
        "",
        f"Command: `python -m benchmarks overlap_prefill --requests {count} --write`. "
        f"Date: {datetime.date.today()}. Commit: {commit()}.",
        "",
        *_ABOUT,
        "",
        "## A request alone",
        "",
        "Bound: nothing but encoding and prefill that is even over the tokens. Milliseconds and their ratio.",
        "",
        "| prefill ÷ encode | bound | bare | a100 |",
        "|---|---|---|---|",
        *simulated.alone_rows([bare, device]),
        "",
        "## Under load",
        "",
        f"{count} requests with Poisson arrivals and 16 tokens of output, `load` times what the slower pool",
        "can do. The same requests at the same moments in both.",
        "",
    ]
    header = [
        "| prefill ÷ encode | load | TTFT without, ms | TTFT | its p90 | time between tokens |",
        "|---|---|---|---|---|---|",
    ]
    for chosen in (bare, device):
        lines += [f"`{chosen.name}`:", "", *header, *simulated.loaded_rows(chosen, count), ""]
    lines += [
        "## Tower and decoder on one device",
        "",
        "Two replicas of `--topology colocated` at 0.6 of their capacity, `a100`:",
        "",
        "| prefill ÷ encode | TTFT without, ms | TTFT | its p90 | time between tokens |",
        "|---|---|---|---|---|",
        *simulated.colocated_rows(device, count),
        "",
        *_WHEN,
        "",
    ]
    return "\n".join(lines)


def live_page(model: str, rounds: int, side: int) -> str:
    load = os.getloadavg()[0]
    found = live.measure(model, rounds, side, ["--encoder-batch-patches", "1"])
    low, high = found.spread
    wait, overlap = (statistics.median(side) * 1e3 for side in (found.wait, found.overlap))
    return "\n".join(
        [
            "# Prefill while other items are encoded: live",
            "",
            f"Command: `python -m benchmarks overlap_prefill --live {model} --rounds {rounds} --side {side} "
            f"--write`. Date: {datetime.date.today()}. Commit: {commit()}. Chip: {chip()}, {os.cpu_count()} "
            f"cores. Load average before: {load:.1f}, at the end: {os.getloadavg()[0]:.1f}.",
            "",
            "Two clusters of two encoders and a PD worker (`triptych serve`), one with `--overlap-prefill`,",
            "one without, in turns: one request of four new pictures at a time, `max_tokens` 1, one picture",
            "in a batch of the tower.",
            "",
            "| | median |",
            "|---|---|",
            f"| TTFT without, ms | {wait:.0f} |",
            f"| TTFT with overlap, ms | {overlap:.0f} |",
            f"| ratio of a pair (quartiles {low:.2f} to {high:.2f}) | **{found.ratio:.2f}** |",
            f"| tokens prefilled early per request | {found.early_tokens / (rounds + live.WARM_UP):.0f} |",
            "",
            "Two encoders and a decoder share the machine's cores: what is prefilled early is taken from the",
            "towers, so that a gain needs a core that is free while they work.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=400, help="of a simulation under load")
    parser.add_argument("--live", nargs="?", const="", metavar="MODEL", help="the demo model by default")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--side", type=int, default=448, help="pixels")
    add_write_flag(parser, SIMULATED)
    options = parser.parse_args()
    if options.live is None:
        publish(simulated_page(options.requests), SIMULATED, write=options.write)
    else:
        publish(live_page(options.live, options.rounds, options.side), LIVE, write=options.write)


if __name__ == "__main__":
    main()
