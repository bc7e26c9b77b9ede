"""Check that an encoder worker's embeddings fit the PD workers of its model. Pure: from registrations alone.

A PD worker takes the embeddings of its model key and of every checkpoint with the same tower, in rows of its
decoder's width. Another encoder worker is of no use to it, and is what a rolling update looks like before the
new PD workers are there. PD workers of 0.2.0 and before name no tower: their model key alone counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from triptych.base.errors import printable
from triptych.base.hashing import tower_of
from triptych.base.types import WorkerInfo

#: The name in a registration's `capacity` of the width of an embedding's row; 0 or none: it names none.
ROW_WIDTH = "row_width"
#: In a worker's capacity: 1 of an encoder that serves its embeddings, or a PD worker that reads them there.
DIRECT = "direct"
#: In a PD worker's capacity: 1 where it loads a request's embeddings once all of them are stored.
WHOLE_REQUESTS = "whole_requests"
#: In a PD worker's capacity: its role, by its place in ROLES; one that does not say has both.
ROLE = "role"
#: `prefill` workers offer requests, once their prompts are computed, to `decode` workers.
ROLES = (BOTH, PREFILL, DECODE) = ("both", "prefill", "decode")
#: The reasons of a Mismatch, which are labels of a metric.
MISMATCHES = ("model", "model_key", "modality", "row_width", "namespace")
_SHOWN = 12
_MAX_NAMED = 4


def role_of(info: WorkerInfo) -> str:
    """The role of a PD worker; "both" of one of another release that names none, or one not known here."""
    place = info.capacity.get(ROLE, 0)
    return ROLES[place] if 0 <= place < len(ROLES) else BOTH


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why no PD worker takes an encoder worker's embeddings.

    `reason` is a word for metrics: "model" (no PD worker has a model of that name), "model_key", "modality",
    "row_width" or "namespace" (it names none). `text` says what is expected and what helps.
    """

    reason: str
    text: str

    @property
    def may_pass(self) -> bool:
        """Whether a PD worker that registers later can end it."""
        return self.reason in ("model", "model_key")


@dataclass(slots=True)
class PDModels:
    """The models of the PD workers, by key, tower and name."""

    by_key: dict[str, WorkerInfo] = field(default_factory=dict)
    by_tower: dict[str, WorkerInfo] = field(default_factory=dict)
    keys_of: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, workers: Iterable[WorkerInfo]) -> PDModels:
        models = cls()
        for info in workers:
            if info.pool == "pd" and info.model_key not in models.by_key:
                models.by_key[info.model_key] = info
                models.keys_of.setdefault(info.model, []).append(info.model_key)
                for namespace in info.namespaces:
                    models.by_tower.setdefault(tower_of(namespace), info)
        return models

    def mismatch(self, encoder: WorkerInfo) -> Mismatch | None:
        """None where its embeddings are taken, or while no PD worker at all is known."""
        if not encoder.namespaces:
            return Mismatch("namespace", "its registration names no namespace: update it to this release")
        if not self.by_key:
            return None
        pd_worker = self.by_key.get(encoder.model_key) or self._of_tower(encoder)
        if pd_worker is None:
            return self._other_key(encoder)
        if encoder.modality != pd_worker.modality:
            return Mismatch(
                "modality",
                f"it encodes {_plain(encoder.modality)}, but the PD workers of its tower take "
                f"{_plain(pd_worker.modality)}: start both from the same checkpoint and release",
            )
        given, taken = encoder.capacity.get(ROW_WIDTH, 0), pd_worker.capacity.get(ROW_WIDTH, 0)
        if given and taken and given != taken:
            return Mismatch(
                "row_width",
                f"its rows are {given} wide, but the PD workers of its tower take {taken}: start both "
                "from the same checkpoint and release",
            )
        return None

    def _of_tower(self, encoder: WorkerInfo) -> WorkerInfo | None:
        found = (self.by_tower.get(tower_of(namespace)) for namespace in encoder.namespaces)
        return next((info for info in found if info is not None), None)

    def _other_key(self, encoder: WorkerInfo) -> Mismatch:
        keys = self.keys_of.get(encoder.model)
        if not keys:
            names = ", ".join(sorted(_plain(name, 80) for name in self.keys_of)[:_MAX_NAMED])
            return Mismatch(
                "model",
                f"no PD worker has a model of this name, there is {names}; it gets no jobs until one of its "
                f"model key {_plain(encoder.model_key)} registers",
            )
        known = ", ".join(_plain(key) for key in keys[:_MAX_NAMED])
        return Mismatch(
            "model_key",
            f"its model key is {_plain(encoder.model_key)}, but its model is decoded with {known}, of "
            "another tower; it gets no jobs until one of its key or tower registers, as in a rolling "
            "update; else give both the same checkpoint, --model-revision, --dtype and --quantization",
        )


def described(encoder: WorkerInfo) -> str:
    """The encoder worker as a log line names it."""
    namespaces = ", ".join(_plain(name) for name in encoder.namespaces[:_MAX_NAMED]) or "none"
    return (
        f"encoder worker {_plain(encoder.address, 64)} ({_plain(encoder.model, 80)}, namespace {namespaces})"
    )


def _plain(word: str, maximum: int = _SHOWN) -> str:
    """The word's beginning on one line, whatever a registration holds."""
    return printable(word[:maximum])
