"""Time to first token of a clip by encoder workers, with a tower of fixed time, in whole clusters."""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import av
import numpy as np

import triptych.demo
from benchmarks.result_page import RESULTS, add_write_flag, fill, publish
from triptych.base.config import WorkerCounts
from triptych.goodput.launch import launched

RESULT = RESULTS / "video_segments.md"
#: Seconds of the tower for each pair of frames; it sleeps, so that encoder workers share no core.
PAIR_SECONDS = 0.05
_FLAGS = ("--threads", "1", "--encoder-threads", "1", "--max-model-len", "2048")
_PATIENCE = 60.0
#: Run by every process at its start: towers take a fixed time from then on.
_FIXED_TOWER = f"""
import builtins, sys, time
plain = builtins.__import__
def importing(*args, **kwargs):
    module = plain(*args, **kwargs)
    cls = getattr(sys.modules.get("triptych.models.generic.encoder"), "GenericEncoder", None)
    if cls is not None and not hasattr(cls, "computed"):
        cls.computed = cls.encode
        def encode(self, items):
            rows = self.computed(items)
            time.sleep({PAIR_SECONDS} * sum(item.grid_thw[0] for item in items if item.modality == "video"))
            return rows
        cls.encode = encode
    return module
builtins.__import__ = importing
"""


def clip(seconds: int, seed: int) -> bytes:
    """Two frames a second, which is what is sampled; a longer clip of a seed begins with the same frames."""
    data, rng = io.BytesIO(), np.random.default_rng(seed)
    with av.open(data, "w", format="mp4") as file:
        stream: Any = file.add_stream("mpeg4", rate=2)
        stream.width = stream.height = 64
        stream.pix_fmt, stream.codec_context.gop_size = "yuv420p", 1
        stream.codec_context.qmin = stream.codec_context.qmax = 3
        for _ in range(2 * seconds):
            picture = np.repeat(np.repeat(rng.integers(0, 255, (8, 8, 3), np.uint8), 8, 0), 8, 1)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())
    return data.getvalue()


def ask(url: str, file: bytes) -> float:
    """Seconds to the answer's only token."""
    source = f"data:video/mp4;base64,{base64.b64encode(file).decode()}"
    content = [{"type": "video_url", "video_url": source}, {"type": "text", "text": "what?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=_PATIENCE) as reply:
        reply.read()
    return time.perf_counter() - began


def measure(encoders: int, lengths: Sequence[int], *flags: str) -> list[float]:
    """Seconds for clips of these lengths in turn; each begins with the frames of the shorter ones."""
    before = os.environ.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        (Path(folder) / "sitecustomize.py").write_text(_FIXED_TOWER)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))
        try:
            shape = WorkerCounts(encoders=encoders, pd_workers=1)
            model = Path(triptych.demo.__file__).parent / "model"
            running = stack.enter_context(launched(shape, str(model), [*_FLAGS, *flags]))
        finally:
            os.environ["PYTHONPATH"] = before
        ask(running.url, clip(16, 1))  # each worker's first video, and the trial of segments
        return [ask(running.url, clip(seconds, 0)) for seconds in lengths]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    whole = [f"{seconds:.2f}" for seconds in measure(1, (60, 60), "--video-segment-frames", "0")]
    rows = [(1, "one item", *whole, "–")]
    for encoders in (1, 2, 4):
        rows.append((encoders, "segments", *(f"{each:.2f}" for each in measure(encoders, (60, 60, 90)))))
    lines = [" | ".join(("", *map(str, row), "")).strip() for row in rows]
    page = fill("video_segments", command="python -m benchmarks video_segments", rows="\n".join(lines))
    publish(page, RESULT, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
