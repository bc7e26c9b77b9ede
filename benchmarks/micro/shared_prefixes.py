"""Time to first token of a long text whose KV another worker has saved, beside computing it.

python -m benchmarks micro shared_prefixes --model CHECKPOINT
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.result_page import page_parser, spread, table
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base.config import PDConfig
from triptych.base.delta import Delta
from triptych.base.metrics import PDMetrics
from triptych.base.types import FinishReason
from triptych.models.base import DecoderSide
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.core.sampling import ResolvedSampling
from triptych.pd_worker.native import build_engine
from triptych.pd_worker.ranks.share import load_share

RESULT = Path("shared_prefixes.md")
_GREEDY = ResolvedSampling(2, 0, 0.0, 1.0, 0, 0, (), frozenset(), True, ())


class _Text:
    """No text: two tokens."""

    finished: FinishReason | None = None
    stop_sequence = ""

    def __init__(self) -> None:
        self._left = 2

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        self._left -= 1
        return "", None if self._left else FinishReason.LENGTH

    def flush(self) -> str:
        return ""


class Worker:
    """An engine of its own, and its last request's time to first token."""

    def __init__(self, config: PDConfig, decoder: DecoderSide) -> None:
        self._decoder = decoder
        self.metrics = PDMetrics("model")
        self._first, self._ended = threading.Event(), threading.Event()
        self.engine = build_engine(config, decoder, None, self._take, self.metrics, model_name="model")
        self.engine.start()

    def _take(self, events: list[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, Delta):
                self._first.set()
            elif event.HasField("finished"):
                self._ended.set()

    def answer(self, token_ids: Sequence[int], root: bytes) -> float:
        """Seconds to the first token."""
        self._first.clear()
        self._ended.clear()
        positions, delta = self._decoder.positions(token_ids, [])
        began = time.monotonic()
        self.engine.submit(
            EngineRequest(
                request_id=uuid.uuid4().hex,
                attempt=1,
                proxy_id="benchmark",
                arrival=began,
                deadline=began + 300,
                prompt_token_ids=list(token_ids),
                features=(),
                ready=frozenset(),
                positions=positions,
                position_delta=delta,
                sampling=_GREEDY,
                prefix_root=root,
                output=_Text(),
            )
        )
        assert self._first.wait(300), "no token"
        seconds = time.monotonic() - began
        assert self._ended.wait(300), "no end"
        return seconds

    def count(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"model_name": "model"}) or 0.0


def _settled(saving: Worker) -> None:
    sharing = saving.engine.sharing
    assert sharing is not None and sharing.saves is not None
    deadline = time.monotonic() + 60
    while sharing.saves._saving:
        assert time.monotonic() < deadline, "the saves do not end"
        time.sleep(0.01)


def measured(config: PDConfig, store: str, tokens: int, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Seconds to first tokens by worker, in turn, and the share of the tokens that came from the store."""
    decoder = load_share(config, 0)
    alone = replace(config, max_model_len=tokens + 16, kv_memory=512 << 20, store=store)
    sharing = replace(alone, share_prefixes="on")
    computing, first, second = (Worker(each, decoder) for each in (alone, sharing, sharing))
    seconds: dict[str, list[float]] = {"computes": [], "computes and saves": [], "loads": []}
    drawn = torch.Generator().manual_seed(0)
    for turn in range(rounds + 1):
        text = torch.randint(10, decoder.geometry.vocab_size - 10, (tokens,), generator=drawn).tolist()
        took = {
            "computes": computing.answer(text, b"r" * 32),
            "computes and saves": first.answer(text, b"r" * 32),
        }
        _settled(first)
        took["loads"] = second.answer(text, b"r" * 32)
        for name, value in took.items() if turn else ():
            seconds[name].append(value)
    loaded = second.count("triptych_pd_shared_kv_loaded_tokens_total") / (tokens * (rounds + 1))
    for worker in (computing, first, second):
        worker.engine.stop()
    return seconds, loaded


def main() -> None:
    parser = page_parser(__doc__, RESULT, tokens=4096, rounds=7, threads=1)
    parser.add_argument("--model", required=True, help="a checkpoint folder")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        store = EmbeddedStore(Path(folder), 2 << 30)
        store.start()
        try:
            seconds, loaded = measured(
                PDConfig(model=args.model, dtype=args.dtype), store.url, args.tokens, args.rounds
            )
        finally:
            store.stop()
    base = statistics.median(seconds["computes"])
    rows = [
        [name, spread([1000 * value for value in values]), f"{statistics.median(values) / base:.2f}"]
        for name, values in seconds.items()
    ]
    lines = table(["worker", "ms to the first token", "of computing"], rows)
    sys.stdout.write("\n".join([*lines, f"{loaded:.1%} of the tokens were loaded"]) + "\n")


if __name__ == "__main__":
    main()
