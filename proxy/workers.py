"""Workers that the proxy knows, and the models that they serve: what its decisions are made from."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from triptych.base.errors import RETRY_AFTER, InvalidRequest, ModelNotFound, Unavailable
from triptych.base.hashing import tower_of
from triptych.base.machine.worker_load import WorkerLoad
from triptych.base.types import ITEMS, TASKS, WorkerInfo
from triptych.proxy.call.validation import ModelKind
from triptych.registry.matching import DIRECT, Mismatch, PDModels, described, role_of

logger = logging.getLogger(__name__)

BIND_POLL_SECONDS = 0.1
#: Names in one error.
MAX_SHOWN = 100


@dataclass(slots=True)
class Worker:
    """A known worker. `alive`: it answered its last health check; `serving`: it takes new work; `silent`: the
    answer to one is late."""

    info: WorkerInfo
    alive: bool = True
    serving: bool = True
    silent: bool = False
    #: Whether it reaches the embedding store, by what it said last.
    reaches_store: bool = True
    #: Whether the registry names it.
    registered: bool = True
    #: Of an encoder: why no PD worker takes its embeddings.
    mismatch: Mismatch | None = None
    #: False for one that gets no jobs because of that.
    matched: bool = True
    #: Its report with its last answer; None from one of an earlier release.
    load: WorkerLoad | None = None

    @property
    def role(self) -> str:
        """Of a PD worker: "both", "prefill" or "decode"."""
        return role_of(self.info)


@dataclass(slots=True)
class Binding:
    """Model key, media namespace and adapter's key (empty: none) that a request keeps for life."""

    model_key: str
    namespace: str
    adapter: str = ""

    def served_by(self, info: WorkerInfo) -> bool:
        """Whether a PD worker has these weights."""
        same_model = info.model_key == self.model_key
        return same_model and (not self.adapter or self.adapter in info.adapters.values())


@dataclass(slots=True)
class _Model:
    """A model key that has been seen."""

    name: str
    kind: ModelKind
    #: Those whose rows its PD workers take.
    towers: set[str] = field(default_factory=set)
    #: Namespaces of encoders in the order in which they were first seen.
    namespaces: list[str] = field(default_factory=list)
    #: Its adapters by name, each with its keys in that order, too.
    adapters: dict[str, list[str]] = field(default_factory=dict)

    def takes(self, info: WorkerInfo) -> bool:
        """Whether an encoder of another model key writes rows that its PD workers take."""
        return any(tower_of(namespace) in self.towers for namespace in info.namespaces)


class WorkersListener(Protocol):
    """Receiver of changes of the known workers."""

    def workers_changed(self) -> None:
        """Workers have come, gone or changed."""

    def worker_lost(self, worker: Worker) -> None:
        """A worker has gone or has stalled."""


class KnownWorkers:
    """The workers by pool and address, their models, and the proxies that share them. No I/O.

    One process may serve both pools, "encoder" and "pd", at one address.
    """

    def __init__(self) -> None:
        self.workers: dict[tuple[str, str], Worker] = {}
        #: Whether the store answers this proxy.
        self.store_ok = True
        #: The store's epoch at the last poll: another value later means that it was flushed or restarted.
        self.epoch = ""
        #: Requests by model that wait for a first namespace: for an encoder, where none has ever been.
        self.unbound: Counter[str] = Counter()
        #: By namespace, the models that its encoders have been of.
        self._encoding: dict[str, list[str]] = {}
        self.on_unbound: Callable[[str], None] = lambda model: None
        #: Live proxies, this one included.
        self.proxies = 1
        self._models: dict[str, _Model] = {}
        self._listeners: list[WorkersListener] = []

    def subscribe(self, listener: WorkersListener) -> None:
        self._listeners.append(listener)

    def report_change(self) -> None:
        for listener in self._listeners:
            listener.workers_changed()

    def report_loss(self, worker: Worker) -> None:
        for listener in self._listeners:
            listener.worker_lost(worker)

    def declare(self, info: WorkerInfo) -> None:
        """Notes the worker's model. Keys are known from a PD worker on; namespaces come from encoders."""
        if info.pool != "pd":
            for namespace in info.namespaces:
                models = self._encoding.setdefault(namespace, [])
                if info.model not in models:
                    models.append(info.model)
            for key, known in self._models.items():
                if key == info.model_key or known.takes(info):
                    known.namespaces += [name for name in info.namespaces if name not in known.namespaces]
            return
        model = self._models.get(info.model_key)
        if model is None:
            kind = ModelKind(
                bool(info.capacity.get("encoder_decoder")),
                info.modality,
                bool(info.capacity.get("pools")),
                TASKS[info.capacity.get("task", 0) % len(TASKS)],
                tuple(each for at, each in enumerate(ITEMS) if info.capacity.get("items", 0) >> at & 1),
            )
            model = self._models[info.model_key] = _Model(info.model, kind)
        model.towers.update(map(tower_of, info.namespaces))
        for name, key in info.adapters.items():
            if key not in (keys := model.adapters.setdefault(name, [])):
                keys.append(key)

    def match_encoders(self) -> bool:
        """Compares the encoders with the PD workers; logs each that does not fit, once. Whether any changed.

        A model key, or tower, that has had a PD worker stays matched while those are away: its requests wait.
        """
        models = PDModels.of(worker.info for worker in self.workers.values())
        changed = False
        for (pool, _), worker in self.workers.items():
            if pool != "encoder":
                continue
            mismatch = models.mismatch(worker.info)
            if mismatch != worker.mismatch:
                _log_match(worker.info, mismatch)
                worker.mismatch = mismatch
            matched = mismatch is None or (mismatch.may_pass and self._takes(worker.info))
            changed |= matched is not worker.matched
            worker.matched = matched
        return changed

    def _takes(self, info: WorkerInfo) -> bool:
        return info.model_key in self._models or any(model.takes(info) for model in self._models.values())

    def mismatches(self) -> Counter[str]:
        """Encoders whose embeddings no PD worker takes, by reason."""
        return Counter(worker.mismatch.reason for worker in self.workers.values() if worker.mismatch)

    def serving(self, pool: str) -> list[Worker]:
        """Workers of "encoder" or "pd" that may get new work."""
        return [
            worker
            for (named, _), worker in self.workers.items()
            if named == pool and worker.matched and worker.alive and worker.serving
        ]

    def well(self, pool: str) -> list[Worker]:
        """Those of them that are not silent; all, where none is well."""
        serving = self.serving(pool)
        return [worker for worker in serving if not worker.silent] or serving

    def silent(self, pool: str) -> list[str]:
        """Addresses of silent workers, whose work goes to others; none where no other is there."""
        well = self.well(pool)
        return [worker.info.address for worker in self.serving(pool) if worker.silent and worker not in well]

    def reaching(self, pool: str) -> list[Worker]:
        """Those that are well and reach the embedding store: they may get work that needs it. Where none
        reaches it, those that can do without."""
        well = self.well(pool)
        reaching = [worker for worker in well if worker.reaches_store]
        if reaching or not self.reads_direct:
            return reaching
        return [worker for worker in well if worker.info.capacity.get(DIRECT)]

    @property
    def reads_direct(self) -> bool:
        """Whether all PD workers read embeddings from the encoders that serve them, if need be without the
        store."""
        serving = self.serving("pd")
        return bool(serving) and all(worker.info.capacity.get(DIRECT) for worker in serving)

    def store_lost(self, pool: str) -> bool:
        """Whether the pool serves, and all of its workers say that they do not reach the store."""
        return bool(self.serving(pool)) and not self.reaching(pool)

    def namespaces_served(self) -> frozenset[str]:
        """Namespaces with an encoder that may get new work."""
        return frozenset(name for worker in self.reaching("encoder") for name in worker.info.namespaces)

    def models(self, allowed: Collection[str] | None = None) -> list[str]:
        """Models that a request may name, whether or not a worker of theirs is live now; of those that are
        `allowed` to its key."""
        return _allowed({model.name for model in self._models.values()}, allowed)

    def adapters(self, allowed: Collection[str] | None = None) -> list[str]:
        """LoRA adapters that a request may name as its model, likewise."""
        names = {name for model in self._models.values() for name in model.adapters}
        return _allowed(names - set(self.models()), allowed)

    def base_of(self, name: str) -> str:
        """The model that the adapter of this name is of, of several the first; "" where the name is none's.

        A model of that name goes before.
        """
        if any(name == model.name for model in self._models.values()):
            return ""
        return min((model.name for model in self._models.values() if name in model.adapters), default="")

    def model_called(self, name: str) -> str:
        """The model that a call of this name is shown with: where it names none, the first."""
        return name or next(iter(self.models()), "")

    def resolve_model(self, name: str, allowed: Collection[str] | None = None) -> str:
        """The model or adapter that a request means; an empty name means the only model.

        InvalidRequest or ModelNotFound, which name what there is, to its key; Unavailable while nothing is
        known.
        """
        models, adapters = self.models(allowed), self.adapters(allowed)
        if name in models or name in adapters:
            return name
        if not self._models:
            raise Unavailable(
                "no PD worker has registered yet: wait while it loads, or start one, `triptych pd MODEL`",
                retry_after=RETRY_AFTER,
            )
        if not name and len(models) == 1:
            return models[0]
        there = ", ".join((models + adapters)[:MAX_SHOWN]) or "none for this key"
        if not name:
            raise InvalidRequest(f"model must name one of {there}", param="model")
        raise ModelNotFound(f"model {name[:80]!r} is not served here; there is {there}", param="model")

    def live_models(self) -> list[str]:
        return sorted({worker.info.model for worker in self.serving("pd")})

    def model_key(self, model: str) -> str | None:
        """The newest key of the model, or of an adapter's, that has a live PD worker with it, else the newest
        one; None: never seen."""
        base = self.base_of(model)
        known = self._models.items()
        if base:
            keys = [key for key, one in known if one.name == base and model in one.adapters]
        else:
            keys = [key for key, one in known if one.name == model]
        if len(keys) < 2:
            return keys[0] if keys else None
        workers = [worker.info for worker in self.serving("pd")]
        live = {info.model_key for info in workers if not base or model in info.adapters}
        return next((key for key in reversed(keys) if key in live), keys[-1])

    def _adapter_key(self, model_key: str, name: str) -> str:
        """The adapter's newest key that a live worker has, else its newest one; "" of a model's name."""
        keys = self._models[model_key].adapters.get(name, []) if self.base_of(name) else []
        if len(keys) < 2:
            return keys[0] if keys else ""
        live = {worker.info.adapters.get(name) for worker in self.serving("pd")}
        return next((key for key in reversed(keys) if key in live), keys[-1])

    def kind(self, model: str) -> ModelKind:
        """What the model takes; a decoder-only one where nothing is known."""
        key = self.model_key(model)
        return ModelKind() if key is None else self._models[key].kind

    def namespace(self, model_key: str) -> str | None:
        """The key's newest namespace with a live encoder, else its newest one; None: never seen."""
        names = self._models[model_key].namespaces
        if len(names) < 2:
            return names[0] if names else None
        live = self.namespaces_served()
        return next((name for name in reversed(names) if name in live), names[-1])

    async def bind(self, name: str, *, media: bool) -> Binding:
        """The newest binding to a served model or adapter; media wait for a namespace, which encoders
        register."""
        model_key, model = self.model_key(name), self.base_of(name) or name
        assert model_key is not None
        if media and self.namespace(model_key) is None:
            self.unbound[model] += 1
            self.on_unbound(model)
            try:
                while self.namespace(model_key) is None:
                    await asyncio.sleep(BIND_POLL_SECONDS)
            finally:
                self.unbound[model] -= 1
        adapter = self._adapter_key(model_key, name)
        return Binding(model_key, self.namespace(model_key) or "", adapter)

    def encoded_by(self, namespace: str, model: str) -> str:
        """The model whose encoders write this model's items: its own, unless only others' have been there."""
        models = self._encoding.get(namespace, [])
        return model if model in models or not models else models[0]

    def limits_of(self, model: str) -> list[int]:
        """`max_model_lens` of what a new request for the model or adapter is bound to."""
        key = self.model_key(model)
        return [] if key is None else self.max_model_lens(Binding(key, "", self._adapter_key(key, model)))

    def max_model_lens(self, bound: Binding) -> list[int]:
        """The limits of all known PD workers that may serve it, live or not; 0 where one names none."""
        infos = [worker.info for worker in self.workers.values() if worker.info.pool == "pd"]
        return [info.capacity.get("max_model_len", 0) for info in infos if bound.served_by(info)]


def _allowed(names: Collection[str], allowed: Collection[str] | None) -> list[str]:
    return sorted(name for name in names if allowed is None or name in allowed)


def _log_match(info: WorkerInfo, mismatch: Mismatch | None) -> None:
    if mismatch is None:
        logger.info("the embeddings of %s are taken now", described(info))
    elif mismatch.reason == "model":
        logger.info("the embeddings of %s are not taken: %s", described(info), mismatch.text)
    else:
        logger.warning("the embeddings of %s are not taken: %s", described(info), mismatch.text)
