"""Evaluates the image demo's JSON on held-out scenes, with schemas and tools that training never saw.

    python -m examples.demo_models.images.evaluate_structured --url URL [--n N]

Half of the requests hold a JSON schema, half tools of which one has to be called. "Valid": the answer
ended by itself and has the schema's fields; "right": every value is the true one.
"""

from __future__ import annotations

import argparse
import json
import random
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from examples.demo_models.images.evaluate import request
from examples.demo_models.images.inference import MODEL_ID, chat_body
from examples.demo_models.images.samples import NO_IMAGE, Sample, random_sample
from examples.demo_models.images.structured import (
    Field,
    ToolCall,
    drawn_call,
    drawn_fields,
    schema_of,
    value_of,
)

_MOST_TOKENS = 400


@dataclass(frozen=True)
class Case:
    """One request: its pictures and question, the answer's fields, and the call where tools are given."""

    sample: Sample
    pictures: bool
    fields: tuple[Field, ...]
    call: ToolCall | None = None

    def body(self, model: str) -> dict[str, Any]:
        pictures = self.sample.pictures if self.pictures else ()
        body = chat_body(request(pictures, self.sample.turns[0].question), model, _MOST_TOKENS)
        schema = schema_of(self.fields)
        if self.call is None:
            form = {"name": "answer", "schema": schema}
            return body | {"response_format": {"type": "json_schema", "json_schema": form}}
        other = {"type": "object", "properties": {"query": {"type": "string"}}}
        tools = [
            {
                "type": "function",
                "function": {"name": n, "parameters": schema if n == self.call.name else other},
            }
            for n in self.call.offered
        ]
        named = {"type": "function", "function": {"name": self.call.name}}
        return body | {"tools": tools, "tool_choice": "required" if self.call.fits else named}


@dataclass(frozen=True)
class Mark:
    case: Case
    said: str
    valid: bool
    right: bool


def cases(seed: int, n: int) -> list[Case]:
    """`n` cases of held-out scenes, of which one in ten has no picture."""
    rng = random.Random(f"structured:{seed}")
    out = []
    for number in range(n):
        sample = random_sample(rng, "held_out", rng.choice((1, 1, 1, 2)), 1)
        turn, pictures = sample.turns[0], rng.random() > 0.1
        query, truth = (turn.query, turn.answer) if pictures else (None, NO_IMAGE)
        scenes = sample.scenes if pictures else ()
        if number % 2:
            call = drawn_call(rng, query, scenes, truth, "held_out")
            out.append(Case(sample, pictures, call.fields, call))
        else:
            out.append(Case(sample, pictures, tuple(drawn_fields(rng, query, scenes, truth, "held_out"))))
    return out


def mark(case: Case, choice: dict[str, Any]) -> Mark:
    """What a chat completion's choice is worth."""
    message, ended = choice["message"], choice["finish_reason"] in ("stop", "tool_calls")
    said, named = str(message.get("content") or ""), True
    if case.call is not None:
        calls = message.get("tool_calls") or []
        said = calls[0]["function"]["arguments"] if calls else said
        named = len(calls) == 1 and calls[0]["function"]["name"] == case.call.name
    try:
        value = json.loads(said)
    except ValueError:
        return Mark(case, said, valid=False, right=False)
    truth = value_of(case.fields)
    valid = ended and isinstance(value, dict) and value.keys() == truth.keys()
    return Mark(case, said, valid, right=valid and named and value == truth)


def evaluate(url: str, model: str, asked: Sequence[Case]) -> list[Mark]:
    """Asks every case of a server, some at a time."""

    def one(case: Case) -> Mark:
        data = json.dumps(case.body(model)).encode()
        post = urllib.request.Request(
            f"{url.rstrip('/')}/v1/chat/completions", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(post, timeout=120) as reply:
            return mark(case, json.load(reply)["choices"][0])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, asked))


def report(marks: Sequence[Mark]) -> str:
    """A Markdown table of schemas and calls."""
    lines = ["| answer | n | valid | right |", "|---|---|---|---|"]
    parts = {"schema": [m for m in marks if m.case.call is None], "call": [m for m in marks if m.case.call]}
    for name, some in {**parts, "**all**": list(marks)}.items():
        valid, right = (100 * sum(getattr(m, what) for m in some) / len(some) for what in ("valid", "right"))
        lines.append(f"| {name} | {len(some)} | {valid:.1f} % | {right:.1f} % |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="an OpenAI-compatible server")
    parser.add_argument("--model", default=MODEL_ID, help="the model's name at the server")
    parser.add_argument("--n", type=int, default=200, help="requests, half of them with tools")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wrong", type=int, default=0, help="print so many wrong answers")
    arguments = parser.parse_args(argv)
    marks = evaluate(arguments.url, arguments.model, cases(arguments.seed, arguments.n))
    print(report(marks))
    for wrong in [m for m in marks if not m.right][: arguments.wrong]:
        turn = wrong.case.sample.turns[0]
        print(
            f"{turn.query.kind}: {turn.question}\n  {json.dumps(value_of(wrong.case.fields))}\n  {wrong.said}"
        )


if __name__ == "__main__":
    main()
