"""Values of autoscaling: what a pool has to do, its workers and rules, and how many it should have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

#: Pools as the registry names them, and the roles of PD workers that may be scaled apart.
POOLS = ("encoder", "pd")
SCALED_ROLES = ("prefill", "decode")
#: Seconds that an item at the encoders or a prompt at the PD workers may take, and a decode worker's token.
ITEM_SLO, TOKEN_SLO = 2.0, 0.1
#: Targets that one proxy may scale: each has a stream of KEDA's.
MAX_TARGETS = 32


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """What a pool is scaled by. ValueError, naming the field and its limit, for what makes no sense.

    `slo` is the seconds that an item may take in the pool, its wait included, and `utilization` the share of
    a worker's time that arriving work may fill. Before a worker is drained, the rest must have been enough
    for `window` seconds for demand that is larger by the share `reserve`.
    """

    minimum: int
    maximum: int
    slo: float
    utilization: float = 0.7
    window: float = 60.0
    reserve: float = 0.25

    def __post_init__(self) -> None:
        if self.minimum < 0:
            raise ValueError(f"minimum is {self.minimum}: it must be 0 or more")
        if self.maximum < max(self.minimum, 1):
            raise ValueError(
                f"maximum is {self.maximum} and minimum is {self.minimum}: "
                "maximum must be at least minimum, and at least 1"
            )
        for name, value, low, high in (
            ("slo", self.slo, 0.0, math.inf),
            ("utilization", self.utilization, 0.0, 1.0),
            ("window", self.window, 0.0, math.inf),
        ):
            if not (low < value <= high and math.isfinite(value)):
                raise ValueError(f"{name} is {value}: it must be above {low:g}, finite, and at most {high:g}")
        if not 0.0 <= self.reserve <= 10.0:
            raise ValueError(f"reserve is {self.reserve}: it must be between 0 and 10")


@dataclass(frozen=True, slots=True)
class ScalingTarget:
    """The workers that one decision is about: a pool, or those of its workers that serve a model, are of a
    kind, or have a role. What is empty is not looked at."""

    pool: str
    model: str = ""
    kind: str = ""
    role: str = ""

    @property
    def name(self) -> str:
        """The pool's name, and behind it what narrows it: as on the board and in logs."""
        more = (("model", self.model), ("kind", self.kind), ("role", self.role))
        return ";".join([self.pool, *(f"{name}={value}" for name, value in more if value)])

    @property
    def rivals(self) -> ScalingTarget:
        """The target without its kind: targets of equal rivals do the same work."""
        return replace(self, kind="")

    def covers(self, model: str, role: str) -> bool:
        """Whether a worker of its pool that serves the model in this role counts, whatever its kind."""
        return self.model in ("", model) and self.role in ("", role)


@dataclass(frozen=True, slots=True)
class ScaledTarget:
    """A target and the rules that scale it. `price` is what a worker costs for a while, in any unit: of
    several kinds that do the same work those with the cheapest item grow first."""

    target: ScalingTarget
    rules: ScalingRules
    price: float = field(default=1.0)


def parse_scaled(text: str, window: float, item_slo: float) -> ScaledTarget:
    """A target as --scale gives it: `encoder;model=NAME;kind=KIND;max=8;price=2`, or `pd;role=decode;max=4`.

    ValueError, naming the part and what it may be.
    """
    pool, *rest = (part.strip() for part in text.split(";"))
    if pool not in POOLS:
        raise ValueError(f"it begins with {pool[:40]!r}: begin with {' or '.join(POOLS)}")
    given: dict[str, str] = {}
    for part in filter(None, rest):
        name, _, value = (each.strip() for each in part.partition("="))
        if name not in ("model", "kind", "role", "min", "max", "slo", "price") or not value:
            raise ValueError(f"{part[:80]!r}: give model, kind, role, min, max, slo or price, as name=value")
        if name in given:
            raise ValueError(f"{name} is given twice: give it once")
        given[name] = value
    role = given.get("role", "")
    if role and (pool != "pd" or role not in SCALED_ROLES):
        raise ValueError(f"role is {role[:40]!r}: only pd has roles, {' and '.join(SCALED_ROLES)}")
    least = 1 if pool == "pd" else 0
    minimum, maximum = _count(given, "min", least), _count(given, "max", 0)
    if minimum < least:
        raise ValueError(f"min is {minimum}: PD workers never go to zero, give 1 or more")
    usual = TOKEN_SLO if role == "decode" else item_slo if pool == "encoder" else ITEM_SLO
    slo = _number(given, "slo", usual)
    price = _number(given, "price", 1.0)
    if not 0.0 < price < math.inf:
        raise ValueError(f"price is {price:g}: give a number above 0")
    target = ScalingTarget(pool, given.get("model", ""), given.get("kind", ""), role)
    return ScaledTarget(target, ScalingRules(minimum, maximum, slo, window=window), price)


def check_targets(scaled: Iterable[ScaledTarget]) -> None:
    """ValueError where two targets count one worker, or where there are too many."""
    targets = [each.target for each in scaled]
    if len(targets) > MAX_TARGETS:
        raise ValueError(f"there are {len(targets)} targets: give {MAX_TARGETS} or fewer")
    for at, one in enumerate(targets):
        for other in targets[:at]:
            if one.pool != other.pool:
                continue
            pairs = ((one.model, other.model), (one.role, other.role), (one.kind, other.kind))
            if not any(mine and theirs and mine != theirs for mine, theirs in pairs):
                raise ValueError(
                    f"{other.name} and {one.name} count the same workers: tell them apart by name"
                )


def _count(given: dict[str, str], name: str, default: int) -> int:
    try:
        return int(given.get(name, default))
    except ValueError:
        raise ValueError(f"{name} is {given[name][:40]!r}: give a whole number") from None


def _number(given: dict[str, str], name: str, default: float) -> float:
    try:
        return float(given.get(name, default))
    except ValueError:
        raise ValueError(f"{name} is {given[name][:40]!r}: give a number") from None


@dataclass(frozen=True, slots=True)
class SharedRules:
    """A pool's rules on the board, which all proxies decide by; None where this version cannot read them.

    A later `generation` replaces an earlier one. They are `supported` while a proxy that was started with
    them is alive and not draining.
    """

    rules: ScalingRules | None
    generation: int
    supported: bool


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """A pool's outstanding and arriving work, of one proxy or of the whole cluster.

    Work is in seconds of one worker of the kind that the pool grows by. What the caches answer is no work;
    an item that is encoded again counts in `backlog` but not as an arrival. `waiting` are the items that no
    worker computes yet and `largest` the work of the largest outstanding one. `fast` and `slow` are the
    arriving work-seconds per second, averaged over some seconds and over about a minute. `kept` is the
    number below which no decrease has held for its window yet; None where the pool may become inactive.
    """

    backlog: float = 0.0
    waiting: int = 0
    largest: float = 0.0
    fast: float = 0.0
    slow: float = 0.0
    kept: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The workers of one kind in a pool. `speed` is relative to the kind that the pool grows by, 1.0.

    `apart`: another decision is about them.
    """

    kind: str
    ready: int
    starting: int = 0
    speed: float = 1.0
    apart: bool = False


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """How many workers a pool should have, of the kind that it grows by, and why.

    `active`: there is work or there was some lately; a pool that is not active may be scaled to zero.
    `reason` is a word for metrics: "flow", "backlog", "panic", "hold", "consolidate", "idle", "min", "max".
    """

    workers: int
    reason: str
    active: bool


def combined(decisions: Mapping[ScalingTarget, ScalingDecision]) -> ScalingDecision | None:
    """Decisions about parts of a pool as one about the pool: its reason names each part, with its workers."""
    parts = []
    for target, decision in decisions.items():
        part = " ".join(filter(None, (target.model, target.kind, target.role)))
        parts.append(f"{part} {decision.workers}: {decision.reason}" if part else decision.reason)
    if not parts:
        return None
    workers = sum(decision.workers for decision in decisions.values())
    return ScalingDecision(workers, ", ".join(parts), any(each.active for each in decisions.values()))
