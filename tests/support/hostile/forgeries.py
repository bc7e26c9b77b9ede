"""Requests that no proxy of ours would send to a PD worker: honest ones with one thing wrong."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.data.pictures import picture
from support.engine.pd_serving import served_model, slot, stored_items
from support.fakes.pd_client import PDClient
from triptych.base.types import ItemPlan
from triptych.pd_worker.native import LoadedModel
from triptych.protos import common_pb2, pd_pb2

FAMILY = "qwen3_vl"
PICTURES = (picture(1, 64, 48), picture(2, 48, 96))
QUESTION = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
GREEDY: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}

Forge = Callable[[pd_pb2.SubmitRequest], object]


def model() -> LoadedModel:
    return served_model(FAMILY)


@functools.cache
def forged_items() -> list[tuple[ItemPlan, bytes]]:
    return stored_items(FAMILY, PICTURES)


def honest(client: PDClient, request_id: str, **sampling: Any) -> pd_pb2.SubmitRequest:
    """A question about two stored pictures."""
    slots = [slot(plan) for plan, _ in forged_items()]
    return client.message(request_id, QUESTION, items=slots, **(GREEDY | sampling))


@dataclass(frozen=True)
class Forgery:
    """`param`: the field that the refusal names."""

    name: str
    forge: Forge
    param: str


def _plan(**values: Any) -> Forge:
    def forge(message: pd_pb2.SubmitRequest) -> None:
        plan = message.items[0].plan
        for name, value in values.items():
            if name == "runs":
                del plan.runs[:]
                plan.runs.extend(common_pb2.Run(start=start, count=count) for start, count in value)
            elif name == "grid_thw":
                plan.grid_thw[:] = value
            else:
                setattr(plan, name, value)

    return forge


def _field(**values: object) -> Forge:
    def forge(message: pd_pb2.SubmitRequest) -> None:
        for name, value in values.items():
            setattr(message, name, value)

    return forge


def _sampling(**values: Any) -> Forge:
    def forge(message: pd_pb2.SubmitRequest) -> None:
        message.sampling.MergeFrom(common_pb2.SamplingParams(**values))

    return forge


def _same_hash(message: pd_pb2.SubmitRequest) -> None:
    message.items[1].plan.mm_hash = message.items[0].plan.mm_hash


def _resume(change: Callable[[pd_pb2.Resume], object]) -> Forge:
    """A resume with the right prompt and places, then changed."""

    def forge(message: pd_pb2.SubmitRequest) -> None:
        [first, second] = (plan for plan, _ in forged_items())
        image = model().decoder.image_token_id
        assert image is not None
        resume = message.resume
        resume.prompt_token_ids.extend([5, *[image] * first.length, 6, *[image] * second.length, 7])
        resume.placements.add(offset=1, length=first.length)
        resume.placements.add(offset=2 + first.length, length=second.length)
        resume.output_token_ids.extend([8, 9])
        message.attempt = 2
        change(resume)

    return forge


def _place(index: int, **values: int) -> Forge:
    def change(resume: pd_pb2.Resume) -> None:
        for name, value in values.items():
            setattr(resume.placements[index], name, value)

    return _resume(change)


def _stray_image(resume: pd_pb2.Resume) -> None:
    resume.prompt_token_ids.append(resume.prompt_token_ids[1])


def _text(text: str) -> bytes:
    return json.dumps([{"role": "user", "content": text}]).encode()


FAR = 2**32 - 1
ROWS = 12
FORGERIES = [
    Forgery("more rows than tokens", _plan(rows=FAR), "items"),
    Forgery("rows and length of another size", _plan(rows=ROWS + 1, length=ROWS + 1), "plan"),
    Forgery("no rows", _plan(rows=0, length=0), "items"),
    Forgery("a length without end", _plan(rows=FAR, length=FAR), "messages"),
    Forgery("a width of another model", _plan(width=7), "items"),
    Forgery("a width without end", _plan(width=FAR), "items"),
    Forgery("no dtype", _plan(dtype=""), "items"),
    Forgery("an unknown dtype", _plan(dtype="float64"), "items"),
    Forgery("overlapping runs", _plan(runs=[(0, 8), (4, 4)]), "items"),
    Forgery("runs out of order", _plan(runs=[(8, 4), (0, 8)]), "items"),
    Forgery("runs beyond the placeholder", _plan(runs=[(FAR, ROWS)]), "items"),
    Forgery("runs without tokens", _plan(runs=[(0, 0)] * ROWS), "items"),
    Forgery("runs that leave rows over", _plan(runs=[(0, 1)]), "items"),
    Forgery("no grid", _plan(grid_thw=[]), "plan"),
    Forgery("a grid of zeros", _plan(grid_thw=[0, 0, 0]), "plan"),
    Forgery("a grid of two sides", _plan(grid_thw=[1, 4]), "plan"),
    Forgery("a grid without end", _plan(grid_thw=[FAR, FAR - 1, FAR - 1]), "plan"),
    Forgery("a grid that does not merge", _plan(grid_thw=[1, 3, 16]), "plan"),
    Forgery("another modality", _plan(modality="audio"), "items"),
    Forgery("a namespace that is none", _plan(namespace="../../x"), "items"),
    Forgery("no key", _plan(mm_hash=""), "mm_hash"),
    Forgery("a key in capitals", _plan(mm_hash="A" * 64), "mm_hash"),
    Forgery("a key that is a path", _plan(mm_hash="../" * 21 + "x"), "mm_hash"),
    Forgery("a key of a megabyte", _plan(mm_hash="a" * (1 << 20)), "mm_hash"),
    Forgery("two plans of one key", _same_hash, "items"),
    Forgery("an item too few", lambda m: m.items.pop(), "messages"),
    Forgery("an item too many", lambda m: m.items.append(m.items[0]), "messages"),
    Forgery("ten thousand items", lambda m: m.items.extend([m.items[0]] * 10_000), "messages"),
    Forgery("another model", _field(model_key="0" * 64), "model_key"),
    Forgery("attempt 0", _field(attempt=0), "attempt"),
    Forgery("no request id", _field(request_id=""), "request_id"),
    Forgery("a request id of a megabyte", _field(request_id="x" * (1 << 20)), "request_id"),
    Forgery("a request id with lines", _field(request_id="x\nready: pd"), "request_id"),
    Forgery("a request id that leads to another's", _field(request_id="../proxy/victim"), "request_id"),
    Forgery("no proxy id", _field(proxy_id=""), "proxy_id"),
    Forgery("a proxy id with a slash", _field(proxy_id="proxy/victim"), "proxy_id"),
    Forgery("a proxy id with a NUL", _field(proxy_id="proxy\0"), "proxy_id"),
    Forgery("no time", _field(timeout=0.0), "timeout"),
    Forgery("time that is over", _field(timeout=-1e30), "timeout"),
    Forgery("a timeout of NaN", _field(timeout=float("nan")), "timeout"),
    Forgery("time without end", _field(timeout=float("inf")), "timeout"),
    Forgery("a salt of a megabyte", _field(salt="x" * (1 << 20)), "salt"),
    Forgery("messages that are no JSON", _field(messages=b"\xff{"), "messages"),
    Forgery("no messages", _field(messages=b"[]"), "messages"),
    Forgery("messages nested without end", _field(messages=b"[" * 100_000), "messages"),
    Forgery("messages of an unknown role", _field(messages=b'[{"role":"root","content":"x"}]'), "messages"),
    Forgery("text too long", _field(messages=_text("x" * 200_000)), "messages"),
    Forgery("a temperature of NaN", _sampling(temperature=float("nan")), "temperature"),
    Forgery("an endless temperature", _sampling(temperature=float("inf")), "temperature"),
    Forgery("a nucleus of nothing", _sampling(top_p=0.0), "top_p"),
    Forgery("a top_p of NaN", _sampling(top_p=float("nan")), "top_p"),
    Forgery("no tokens", _sampling(max_tokens=0), "max_tokens"),
    Forgery("tokens without end", _sampling(max_tokens=FAR), "max_tokens"),
    Forgery("more least tokens than most", _sampling(min_tokens=FAR), "min_tokens"),
    Forgery("an empty stop string", _sampling(stop=[""]), "stop"),
    Forgery("a stop string of a megabyte", _sampling(stop=["x" * (1 << 20)]), "stop"),
    Forgery("stop strings without end", _sampling(stop=["x"] * 10_000), "stop"),
    Forgery("a bias beyond the vocabulary", _sampling(logit_bias={10**9: 1.0}), "logit_bias"),
    Forgery("a bias of NaN", _sampling(logit_bias={3: float("nan")}), "logit_bias"),
    Forgery("a bias too high", _sampling(logit_bias={3: 101.0}), "logit_bias"),
    Forgery("biases without end", _sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias"),
    Forgery("stop tokens without end", _sampling(stop_token_ids=range(200)), "stop_token_ids"),
    Forgery("a placement beyond the prompt", _place(1, offset=FAR), "resume"),
    Forgery("a placement over text", _place(0, offset=0), "resume"),
    Forgery("overlapping placements", _place(1, offset=1), "resume"),
    Forgery("a placement without end", _place(0, length=FAR), "resume"),
    Forgery("an empty placement", _place(0, length=0), "resume"),
    Forgery("a placement too few", _resume(lambda r: r.placements.pop()), "resume"),
    Forgery("a placement too many", _resume(lambda r: r.placements.add(offset=0, length=1)), "resume"),
    Forgery("a prompt out of the vocabulary", _resume(lambda r: r.prompt_token_ids.append(FAR)), "resume"),
    Forgery("output out of the vocabulary", _resume(lambda r: r.output_token_ids.append(FAR)), "resume"),
    Forgery("image tokens of nobody", _resume(_stray_image), "resume"),
    Forgery("a prompt without end", _resume(lambda r: r.prompt_token_ids.extend([5] * 100_000)), "messages"),
    Forgery("output without end", _resume(lambda r: r.output_token_ids.extend([5] * 100_000)), "resume"),
]
