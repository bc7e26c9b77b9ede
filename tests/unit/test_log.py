"""One record is one line of JSON, whatever its texts hold, with the ids as fields."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from triptych.base.log import JsonFormatter, log_fields, setup_logging

logger = logging.getLogger("triptych.some.module")


@pytest.fixture
def restored() -> Iterator[None]:
    """The logging and the hooks of this process, as they were before the test."""
    root = logging.getLogger()
    handlers, level, hooks = root.handlers[:], root.level, (sys.excepthook, threading.excepthook)
    yield
    root.handlers[:], root.level = handlers, level
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)


@pytest.fixture
def written(restored: None, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What has been logged as JSON."""
    stream = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        setup_logging("pd-0", "debug", "json")
    return stream


@pytest.fixture
def records(written: io.StringIO):
    """Reads the records that have been logged."""
    return lambda: [json.loads(line) for line in written.getvalue().splitlines()]


def test_a_record_names_process_level_logger_and_time(records):
    logger.info("loaded %d layers", 3)
    (record,) = records()
    assert record["message"] == "loaded 3 layers"
    assert (record["process"], record["level"], record["logger"]) == ("pd-0", "info", "triptych.some.module")
    assert record["time"].endswith("+00:00")


def test_ids_are_fields_and_keys_are_shortened(records):
    extra = log_fields(request_id="r1", label="mine", attempt=2, mm_hash="ab" * 32, worker="10.0.0.7:50051")
    logger.warning("request %s goes on elsewhere", "r1", extra=extra)
    (record,) = records()
    assert {name: record[name] for name in ("request_id", "label", "attempt", "worker")} == {
        "request_id": "r1",
        "label": "mine",
        "attempt": 2,
        "worker": "10.0.0.7:50051",
    }
    assert record["mm_hash"] == "ab" * 6


def test_empty_texts_are_no_fields():
    assert log_fields(request_id="r1", label="", worker="", model="", tenant="") == {"request_id": "r1"}


@pytest.mark.parametrize(
    "end", ["\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029", "\0", "\x1b[2J"]
)
def test_no_text_of_a_client_ends_the_line(written, end):
    forged = f'x{end}{{"level": "critical", "message": "forged"}}'
    logger.info("model %s", forged, extra=log_fields(label=forged, model=forged))
    text = written.getvalue()
    assert len(text.splitlines()) == 1 and text.isascii() and "\x1b" not in text
    record = json.loads(text)
    assert record["message"] == f"model {forged}" and record["label"] == forged


def test_a_half_of_a_surrogate_pair_is_logged_too():
    # Formatted here and not logged: pytest keeps what is logged, and could not send it between processes.
    record = logging.makeLogRecord({"msg": "%s", "args": ("\ud800",)})
    line = JsonFormatter("pd-0").format(record)
    assert line.isascii() and json.loads(line)["message"] == "\ud800"


def test_an_exception_is_one_field(records):
    try:
        raise ValueError("line one\nline two")
    except ValueError:
        logger.exception("request %s", "r1", extra=log_fields(request_id="r1"))
    (record,) = records()
    assert record["exception"].startswith("Traceback") and "line one\nline two" in record["exception"]
    assert record["request_id"] == "r1"


def test_a_long_message_is_cut_and_a_long_traceback_keeps_its_end(records):
    try:
        raise ValueError("y" * 100_000 + "the end")
    except ValueError:
        logger.exception("%s", "x" * 100_000)
    (record,) = records()
    assert len(record["message"]) == 8192
    assert len(record["exception"]) == 16384 and record["exception"].endswith("the end")


def test_a_value_that_json_does_not_know_loses_no_record():
    record = logging.makeLogRecord({"msg": "m", "request_id": object()})
    assert "object object" in json.loads(JsonFormatter("p").format(record))["request_id"]


def test_warnings_of_python_are_records(records):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old and\nodd", stacklevel=1)
    (record,) = records()
    assert record["logger"] == "py.warnings" and "old and\nodd" in record["message"]


def test_an_exception_in_a_thread_is_a_record(records):
    def fail() -> None:
        raise RuntimeError("in a thread")

    thread = threading.Thread(target=fail, name="loader")
    thread.start()
    thread.join(10)
    (record,) = records()
    assert record["level"] == "critical" and "loader" in record["message"]
    assert "in a thread" in record["exception"]


def test_an_exception_that_ends_the_process_is_a_record():
    code = "from triptych.base.log import setup_logging; setup_logging('pd-0', 'info', 'json'); 1 / 0"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "ZeroDivisionError" in json.loads(line)["exception"]


def test_a_configuration_that_cannot_work_is_a_record_too():
    words = ["proxy", "--log-format", "json", "--store", "redis://127.0.0.1:1/0", "--host", "0.0.0.0"]
    done = subprocess.run(
        [sys.executable, "-m", "triptych.apps.cli", *words], capture_output=True, text=True, timeout=60
    )
    (line,) = done.stderr.splitlines()
    record = json.loads(line)
    assert done.returncode == 2 and record["level"] == "critical" and "--api-key" in record["message"]


def test_text_stays_lines_of_text(restored, capsys):
    setup_logging("pd-0")
    logger.info("loaded", extra=log_fields(request_id="r1"))
    assert capsys.readouterr().err.endswith(" I pd-0 triptych.some.module: loaded\n")
