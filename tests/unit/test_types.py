"""Placements, errors over a process border, metrics of all processes, and SIGTERM in a container."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from triptych import __version__
from triptych.base import errors
from triptych.base.metrics import MAX_KINDS, EncoderMetrics, PDMetrics, ProxyMetrics, new_registry
from triptych.base.types import ItemPlan, Placement, runs_of

ROOT = Path(__file__).parents[2]

masks = st.lists(st.booleans(), min_size=1, max_size=40)


def _placement(mask: list[bool]) -> Placement:
    return Placement(offset=0, length=len(mask), runs=runs_of(mask))


def test_rows_of_a_range_skip_the_tokens_that_take_no_embedding():
    assert _placement([False, True, False, True, True]).embeds_in(3, 5) == (1, 3)


def test_a_range_of_special_tokens_alone_consumes_no_rows():
    assert _placement([False, True, False, False]).embeds_in(2, 4) == (1, 1)


@given(masks, st.data())
def test_chunks_together_consume_exactly_the_rows_of_one_shot(mask, data):
    placement = _placement(mask)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(mask)), max_size=6)) | {0, len(mask)})
    rows = [
        row for lo, hi in zip(cuts, cuts[1:], strict=False) for row in range(*placement.embeds_in(lo, hi))
    ]
    assert rows == list(range(sum(mask)))
    assert placement.num_embeds() == sum(mask)


@given(masks)
def test_runs_describe_the_mask(mask):
    runs = runs_of(mask)
    rebuilt = [False] * len(mask)
    for start, count in ((0, len(mask)),) if runs is None else runs:
        rebuilt[start : start + count] = [True] * count
    assert rebuilt == mask


def test_a_range_outside_the_span_consumes_nothing():
    lo, hi = Placement(offset=4, length=3).embeds_in(5, 9)
    assert lo == hi


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 240), ("bfloat16", 120), ("float16", 120)])
def test_bytes_of_a_plan_follow_its_dtype(dtype, nbytes):
    plan = ItemPlan("0" * 64, "1" * 64, "image", rows=3, width=20, dtype=dtype, length=3)
    assert plan.nbytes == nbytes


REQUEST_ERRORS = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.RequestError) and cls is not errors.RequestError
]


@pytest.mark.parametrize("cls", REQUEST_ERRORS)
def test_an_error_comes_back_from_its_code_as_itself(cls):
    back = errors.error_from_code(cls.code, "why", param="field", retry_after=1.0)
    assert type(back) is cls
    assert (back.message, back.param, back.retry_after) == ("why", "field", 1.0)


def test_an_unknown_code_is_our_fault():
    assert type(errors.error_from_code("new", "why")) is errors.InternalError


def test_codes_and_statuses_name_one_error_each():
    assert len({cls.code for cls in REQUEST_ERRORS}) == len(REQUEST_ERRORS)
    assert all(400 <= cls.status < 600 for cls in REQUEST_ERRORS)


def _registries() -> dict[str, CollectorRegistry]:
    return {
        "proxy": ProxyMetrics().registry,
        "encoder": EncoderMetrics("m").registry,
        "pd": PDMetrics("m").registry,
    }


def _samples(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("process", ["proxy", "encoder", "pd"])
def test_no_series_is_a_time_of_creation(process):
    assert not [line for line in _samples(_registries()[process]) if "_created" in line.partition("{")[0]]


@pytest.mark.parametrize("process", ["proxy", "encoder", "pd"])
def test_every_page_has_the_process_and_its_version(process):
    registry = _registries()[process]
    assert registry.get_sample_value("process_resident_memory_bytes")
    assert registry.get_sample_value("process_start_time_seconds")
    assert registry.get_sample_value("triptych_build_info", {"version": __version__}) == 1


def test_both_sides_of_a_replica_share_a_registry():
    registry = new_registry()
    encoder = EncoderMetrics("m", registry)
    PDMetrics("m", registry, encoder.parameter_bytes)
    assert registry.get_sample_value("process_start_time_seconds")


def test_ten_thousand_kinds_of_workers_make_a_bounded_number_of_series():
    metrics = ProxyMetrics()
    for index in range(10_000):
        metrics.encode_cost.labels(metrics.kind(f"kind {index}" + "x" * 10_000), "m").set(1.0)
    lines = [line for line in _samples(metrics.registry) if "encode_cost" in line]
    assert len(lines) == MAX_KINDS + 1 and max(map(len, lines)) < 200
    assert metrics.kind("kind 3" + "x" * 10_000).startswith("kind 3")


#: A program whose SIGTERM is ignored, as Linux ignores it for a container's first process without a handler.
FIRST_PROCESS = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from triptych.base.parent import end_on_sigterm
end_on_sigterm({process})
print("ready", flush=True)
time.sleep({seconds})
"""


def exit_code(process: int, seconds: float) -> int:
    """How the program ends that is sent SIGTERM."""
    program = FIRST_PROCESS.format(process=process, seconds=seconds)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGTERM)
        return running.wait(timeout=30)


def test_sigterm_ends_a_first_process_that_still_starts() -> None:
    assert exit_code(process=1, seconds=60) == 128 + signal.SIGTERM


def test_another_process_keeps_what_it_had_for_sigterm() -> None:
    assert exit_code(process=2, seconds=0.2) == 0


#: Threads that bring msgspec a new type at once, again and again.
_THREADS_WITH_NEW_TYPES = """
import sys, threading
import msgspec
from triptych.base.types import prepared
sys.setswitchinterval(1e-6)
for number in range(100):
    fields = [(f"field{at}", int | str | None, None) for at in range(12)]
    inner = msgspec.defstruct("Inner", fields)
    outer = msgspec.defstruct("Outer", [("inner", list[inner], None), *fields])
    together, got = threading.Barrier(4), []
    def decode():
        together.wait()
        got.append(msgspec.json.decode(b'{"inner": [{"field11": "x"}], "field5": 2}', type=prepared(outer)))
    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [outer(inner=[inner(field11="x")], field5=2)] * 4
"""


def test_threads_that_bring_msgspec_a_new_type_at_once_all_decode_it():
    """Unprepared, the process ends by a segmentation fault within some ten types."""
    done = subprocess.run([sys.executable, "-c", _THREADS_WITH_NEW_TYPES], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_type_that_a_function_decodes_to_is_prepared():
    """But for containers of plain values: decoders of modules are made as these are imported."""
    calls = re.compile(r"(?:json|msgpack)\.decode\(.*\btype=(.+)\)|msgspec\.convert\([^,]+, ([^)]+)\)")
    plain = re.compile(r"(dict|list|tuple)\[[a-z., \[\]]+\]$")
    found = {
        f"{file.relative_to(ROOT)}: {kind}"
        for package in ("proxy", "encoder_worker", "pd_worker", "ec_connector", "protos", "triptych")
        for file in (ROOT / package).rglob("*.py")
        for match in calls.finditer(file.read_text())
        if not (kind := match[1] or match[2]).startswith("prepared(") and not plain.match(kind)
    }
    assert found == set()
