"""Seconds of encoding again under volatile-lru, and under volatile-ttl with TTLs by cost per byte."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.result_page import RESULTS, add_write_flag, publish
from benchmarks.store_eviction.replay import Policy, reencoded, reencoded_for_real, server_version
from benchmarks.store_eviction.trace import MIXES, Shape
from triptych.progress.progress import each

PAGE = RESULTS / "store_eviction.md"
PLOT = RESULTS / "store_eviction.png"
PARTS = (0.05, 0.1, 0.2, 0.4)
TTLS = (30.0, 120.0, 600.0, 3600.0)
SEEDS = (1, 2, 3)
_LRU = Policy("volatile-lru")
#: The trace of the comparison with a real server: half a minute, and TTLs as much shorter.
_SHORT = {"requests": 6000, "per_second": 200.0}
_SHORT_POLICIES = (_LRU, Policy("volatile-ttl", 12.0))
_SHRINK = 256
#: What volatile-ttl has to save to be adopted.
_WORTH = 0.9


@dataclass(frozen=True, slots=True)
class Row:
    """One cell: seconds with volatile-lru, and those with volatile-ttl over them, by TTL."""

    mix: str
    fresh: float
    part: float
    seconds: float
    ratios: dict[float, float]


def measured() -> list[Row]:
    """Every cell in the model; means of all seeds."""
    rows = []
    for mix in each("mixes", MIXES):
        for fresh in (0.0, 0.2):
            shape = Shape(mix, fresh=fresh)
            for part in PARTS:
                base = _mean(shape, part, _LRU)
                ratios = {ttl: _mean(shape, part, Policy("volatile-ttl", ttl)) / base for ttl in TTLS}
                rows.append(Row(mix, fresh, part, base, ratios))
    return rows


def _mean(shape: Shape, part: float, policy: Policy) -> float:
    return statistics.mean(reencoded(shape, part, policy, seed) for seed in SEEDS)


def compared_with_a_server() -> list[str]:
    """Rows of the model against a real server, with the same requests."""
    shape = Shape(MIXES[1], **_SHORT)  # type: ignore[arg-type]
    rows = []
    for policy in _SHORT_POLICIES:
        model = reencoded(shape, 0.2, policy, 1)
        real = reencoded_for_real(shape, 0.2, policy, 1, _SHRINK)
        rows.append(f"| {policy} | {model:.1f} | {real:.1f} | {model / real:.2f} |")
    return rows


def page(rows: list[Row], compared: list[str]) -> str:
    """The page's text."""
    head = " | ".join(f"ttl {ttl:g} s" for ttl in TTLS)
    lines = [
        f"| {row.mix} | {row.fresh:.0%} | {row.part:.0%} | {row.seconds:.0f} | "
        + " | ".join(f"{row.ratios[ttl]:.2f}" for ttl in TTLS)
        + " |"
        for row in rows
    ]
    best = min(TTLS, key=lambda ttl: max(row.ratios[ttl] for row in rows))
    return TEXT.format(
        head=head,
        rule=" | ".join("---" for _ in TTLS),
        rows="\n".join(lines),
        best=best,
        least=min(row.ratios[best] for row in rows),
        most=max(row.ratios[best] for row in rows),
        alone=_range([row for row in rows if row.mix == MIXES[0]]),
        mixed=_range([row for row in rows if row.mix == MIXES[1]]),
        version=server_version(),
        compared="\n".join(compared),
        shrink=_SHRINK,
        seeds=len(SEEDS),
    )


def _range(rows: list[Row]) -> str:
    found = [ratio for row in rows for ratio in row.ratios.values()]
    worth = sum(ratio <= _WORTH for ratio in found)
    return f"{min(found):.2f} to {max(found):.2f}, at most {_WORTH:.2f} in {worth} of {len(found)} cells"


TEXT = """# Eviction: volatile-lru or volatile-ttl

    python -m benchmarks store_eviction --write

Which policy loses the fewest seconds of encoding, where the store is too small for all embeddings?
`volatile-lru` evicts what was not used for longest. `volatile-ttl` evicts what expires first: with TTLs by
cost per byte, begun anew at every look-up, what is cheap to encode again for its size goes first.

**Decision: `volatile-lru` stays.** Adopted would be what saves 10 % (a ratio of 0.90) everywhere.

- One model of pictures: {alone}.
- Pictures, sounds and texts in one store: {mixed}.
- The TTL that is best in its worst cell, {best:g} s, gives {least:.2f} to {most:.2f}.

Cost per byte differs little between pictures, so that a TTL by cost makes little but the order of
use worse. In a mixed store it can save much, but only with a TTL near the time that an embedding stays,
which depends on the load: with a shorter one embeddings expire that there is room for, with a longer one
the order of use is lost. No TTL does well in both.

## Seconds of encoding again

Ratio: seconds with `volatile-ttl` over those with `volatile-lru`. Below 1 it saves. Mean of {seeds} traces.

| items | new every 250 s | memory, of all | lru, s | {head} |
| --- | --- | --- | --- | {rule} |
{rows}

![Ratio by memory for each TTL](store_eviction.png)

2000 items, 20,000 requests at 20/s, Zipf with exponent 0.9. TTL of an item: that of the column times its
seconds per byte over the middle item's, within a factor of 16. First encodings do not count. Not measured
but chosen are the seconds per item: a picture 4 ms, 8 us a patch and 1.2 ns a patch squared; a sound 6 ms
and 12 ms for each 30 s; a text 10 ms and 30 us a token. Only the store is modelled, not queues and workers.

## The model against a real server

The model samples five keys and keeps a pool of sixteen, and its clock of use has one second, as in Redis
and Valkey. The same 6000 requests in 30 s on {version}, values {shrink} times smaller, memory for 20 % of
all:

| policy | model, s | server, s | ratio |
| --- | --- | --- | --- |
{compared}
"""


def draw(rows: list[Row], path: Path) -> None:
    """The ratios by memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(MIXES), figsize=(10, 4), sharey=True)
    for axis, mix in zip(axes, MIXES, strict=True):
        for ttl in TTLS:
            cells = [row for row in rows if row.mix == mix and not row.fresh]
            axis.plot(
                [100 * row.part for row in cells],
                [row.ratios[ttl] for row in cells],
                marker="o",
                label=f"{ttl:g} s",
            )
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.axhline(_WORTH, color="grey", linewidth=0.8, linestyle="--")
        axis.set(title=mix, xlabel="memory, % of all embeddings", xscale="log")
        axis.set_xticks([100 * part for part in PARTS], [f"{100 * part:g}" for part in PARTS])
        axis.minorticks_off()
    axes[0].set_ylabel("seconds of encoding again,\nvolatile-ttl / volatile-lru")
    axes[0].legend(title="TTL of the middle item")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks store_eviction", description=__doc__)
    add_write_flag(parser, PAGE)
    options = parser.parse_args()
    rows = measured()
    publish(page(rows, compared_with_a_server()), PAGE, write=options.write)
    if options.write:
        draw(rows, PLOT)


if __name__ == "__main__":
    main()
