"""Fuzzing in two sizes: a few thousand inputs in `make test`, a hundred thousand in `make test-slow`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from triptych.base.errors import RequestError
from triptych.proxy.http.json_body import error_json

M = TypeVar("M", bound=Message)

#: Hypothesis remembers all that it has tried: a fresh run now and then keeps it fast and small.
_BATCH = 500
#: Values at the edges of what fields hold.
_NUMBERS = (0, 1, 2, 3, 5, 7, 16, 63, 64, 255, 256, 65535, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
_TEXTS = ["", "x", "a" * 64, "f" * 64, "A" * 64, "../../etc/passwd", "\n\r\x00", "{}", "[]", "{", "null"]
_TEXTS += [
    "<|image_pad|>",
    "<|im_end|>",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "é\u202e😀",
    "user",
    "assistant",
    "image",
]
_TEXTS += [
    "1e999",
    "NaN",
    "[" * 5000,
    '{"a":' * 2000,
    '[{"role":"user","content":"x"}]',
    '"\\ud800"',
    "(a+)+$",
]


@dataclass(frozen=True)
class Fuzzer:
    """`scale` multiplies the number of inputs; `tried` counts them for the report."""

    scale: int
    report: Callable[[str, int], None]

    def run(
        self, name: str, inputs: st.SearchStrategy[Any], check: Callable[[Any], None], count: int
    ) -> None:
        """Gives `count` x scale inputs to `check`; the smallest that fails is shown."""
        total = count * self.scale
        for start in range(0, total, _BATCH):
            tried = min(_BATCH, total - start)

            @seed(start)
            @settings(
                max_examples=tried,
                deadline=None,
                database=None,
                phases=[Phase.explicit, Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            @given(inputs)
            def one_batch(value: Any) -> None:
                check(value)

            one_batch()
        self.report(name, total)


def refused_well(error: RequestError) -> None:
    """An error of the client's, short, that names a field and can be written."""
    assert 400 <= error.status < 500, error
    assert error.param, error
    assert len(error.message) < 2000, error
    assert error_json(error)


def mutated(originals: list[bytes]) -> st.SearchStrategy[bytes]:
    """Files with flipped bits, cuts, repeats, foreign pieces and numbers at their edges."""
    return st.builds(mutate, st.sampled_from(originals), randoms(), st.just(originals))


def randoms() -> st.SearchStrategy[random.Random]:
    """Generators by seed: far faster than hypothesis's own, which shrinks every number drawn."""
    return st.integers(0, (1 << 64) - 1).map(random.Random)


def mutate(original: bytes, rng: random.Random, donors: list[bytes]) -> bytes:
    data = bytearray(original)
    for _ in range(rng.choice((0, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        # Headers say more than pixels.
        at = at if rng.random() < 0.5 else min(at, rng.randrange(64))
        match rng.randrange(7):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at:]
            case 2:
                del data[at : at + rng.randrange(1, 32)]
            case 3:
                data[at:at] = data[at : at + rng.randrange(1, 64)]
            case 4:
                donor = rng.choice(donors)
                begin = rng.randrange(len(donor) + 1)
                data[at : at + 16] = donor[begin : begin + rng.randrange(1, 200)]
            case 5:
                width = rng.choice((1, 2, 4, 8))
                value = rng.choice((0, 1, (1 << 8 * width) - 1, 1 << (8 * width - 1)))
                data[at : at + width] = value.to_bytes(width, rng.choice(("big", "little")))
            case _:
                data[at:at] = rng.randbytes(rng.randrange(1, 16))
    return bytes(data)


def json_values() -> st.SearchStrategy[Any]:
    """Anything JSON can say, small."""
    return randoms().map(random_json)


def random_json(rng: random.Random, depth: int = 3) -> Any:
    """A value of any kind; numbers and texts lie at the edges more often than not."""
    kind = rng.randrange(10 if depth else 8)
    if kind < 3:
        return rng.choice(_TEXTS)
    if kind < 6:
        return rng.choice((*_NUMBERS, -1, -5, 1 << 63, 1 << 64, -(1 << 70), 1 << 70, 0.5, -0.0, 1e308, 1.5))
    if kind < 8:
        return rng.choice((None, True, False, "", _random_text(rng)))
    if kind < 9:
        return [random_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {_random_text(rng): random_json(rng, depth - 1) for _ in range(rng.randrange(4))}


def _random_text(rng: random.Random) -> str:
    maximum = rng.choice((0x7F, 0xFF, 0x10FFFF))
    codes = (rng.randrange(maximum) for _ in range(rng.randrange(8)))
    return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


Known = Mapping[str, Sequence[Any]]


def messages(kind: type[M], known: Known | None = None) -> st.SearchStrategy[M]:
    """Protobuf messages of `kind`: random fields, and mutated wire bytes that still parse.

    `known` gives values by field name (at any depth) that lead deeper than random ones would.
    """
    return randoms().map(lambda rng: random_message(kind, rng, known or {}))


def random_message(kind: type[M], rng: random.Random, known: Known) -> M:
    message = kind()
    fields: Sequence[Any] = kind.DESCRIPTOR.fields
    for field in fields:
        chosen = known.get(field.name)
        if rng.random() < (0.9 if chosen else 0.4):
            count = rng.randrange(4) if field.is_repeated else 1
            _set(message, field, [_value(field, rng, known) for _ in range(count)])
    if rng.random() < 0.2:
        raw = message.SerializeToString()
        with contextlib.suppress(DecodeError):
            return kind.FromString(mutate(raw, rng, [raw or b"\x0a"]))
    return message


def _value(field: Any, rng: random.Random, known: Known) -> Any:
    chosen = known.get(field.name)
    if chosen and rng.random() < 0.8:
        return rng.choice(chosen)
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            return random_message(field.message_type._concrete_class, rng, known)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice([value.number for value in field.enum_type.values])
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.choice((rng.choice(_TEXTS).encode(), rng.randbytes(rng.randrange(64))))
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.choice((rng.choice(_TEXTS), _random_text(rng)))
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice((*_FLOATS, rng.uniform(-2, 2), rng.uniform(-1e9, 1e9)))
        case _:
            return _integer(field, rng)


def _integer(field: FieldDescriptor, rng: random.Random) -> int:
    wide = field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
    signed = field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_INT32)
    maximum = 1 << ((64 if wide else 32) - signed)
    low = -maximum if signed else 0
    edges = [number for number in (-1, -5, *_NUMBERS) if low <= number < maximum]
    return rng.choice((rng.choice(edges), rng.choice(edges), rng.randrange(low, maximum)))


def _set(message: Message, field: FieldDescriptor, values: list[Any]) -> None:
    if field.is_repeated and field.message_type and field.message_type.GetOptions().map_entry:
        getattr(message, field.name).update({entry.key: entry.value for entry in values})
    elif field.is_repeated:
        getattr(message, field.name).extend(values)
    elif isinstance(values[0], Message):
        getattr(message, field.name).CopyFrom(values[0])
    else:
        setattr(message, field.name, values[0])
