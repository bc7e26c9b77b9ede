"""Three tasks on one sound against the same three kept apart: what it saves to encode and project once.

    python -m benchmarks encdec_sharing [--rounds 9] [--seconds 30] [--tokens 16] [--encoders 1] [--write]

A cluster (`triptych serve`) of a model of the shape of Whisper base with random weights, in a temporary
folder. Each round asks for a transcript, a translation and a transcript with times of one sound at once: with
one `cache_salt`, so that they share the encoder's output and the cross table, and with three. Every round's
salts are new, so nothing of an earlier round is found; the features of the file, which no salt changes, are
there in both. Both kinds take turns. Needs the `worker` and `embedded` extras.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import datetime
import io
import itertools
import os
import platform
import statistics
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import soundfile
import torch
import transformers
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from benchmarks.baselines.processes import usages
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.config import WorkerCounts
from triptych.goodput.launch import Launched, launched
from triptych.goodput.report.machine import commit
from triptych.progress.progress import each

RESULT = RESULTS / "encdec_sharing.md"
START_SECONDS = 180.0
TARGET = 2.0
TASKS = ("transcribe", "translate", "times")
_TEXT = 50257
_SPECIALS = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", *(f"<|l{n}|>" for n in range(98))),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"),
    "<|notimestamps|>",
)
_TIMES = tuple(f"<|{step * 0.02:.2f}|>" for step in range(1501))
_COUNTED = ("triptych_encoder_tower_items_total", "triptych_pd_projections_total")


@dataclass(frozen=True, slots=True)
class Round:
    """Three tasks at once: seconds until all are done, CPU seconds of the cluster, outputs computed."""

    wall: float
    cpu: float
    encoded: float
    projected: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the sound")
    parser.add_argument("--tokens", type=int, default=16, help="output tokens of each task")
    parser.add_argument("--encoders", type=int, default=1)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="encdec-sharing-") as folder:
        model = build_model(Path(folder) / "whisper-base-shaped")
        shape = WorkerCounts(encoders=options.encoders, pd_workers=1)
        with launched(shape, str(model), ["--kv-memory", "256MiB"], START_SECONDS) as cluster:
            rounds = asyncio.run(measure(cluster, options))
    text = report(rounds, options)
    publish(text, RESULT, write=options.write)


def build_model(folder: Path) -> Path:
    """A checkpoint of Whisper base's shape: random weights, and a vocabulary of pieces without meaning."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    ids: Mapping[str, int] = {text: tokenizer.convert_tokens_to_ids(text) for text in _SPECIALS}
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=80,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dtype="float32",
    )
    model = WhisperForConditionalGeneration(config)
    generation = model.generation_config
    generation.update(
        decoder_start_token_id=start,
        is_multilingual=True,
        lang_to_id={"<|en|>": ids["<|en|>"]},
        task_to_id={name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        max_length=448,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    return folder


def _tokenizer() -> WhisperTokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"piece{n}" for n in range(_TEXT - 256))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _TIMES])
    end = "<|endoftext|>"
    return WhisperTokenizer(
        tokenizer_object=tokenizer,
        bos_token=end,
        eos_token=end,
        unk_token=end,
        pad_token=end,
        model_max_length=448,
        additional_special_tokens=list(_SPECIALS[1:]),
    )


async def measure(cluster: Launched, options: argparse.Namespace) -> dict[str, list[Round]]:
    """Rounds of both kinds in turns, after one of each that does not count."""
    audio = base64.b64encode(_sound(options.seconds)).decode()
    rounds: dict[str, list[Round]] = {"shared": [], "apart": []}
    timeout = aiohttp.ClientTimeout(300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for number, kind in each("rounds", list(itertools.product(range(options.rounds + 1), rounds))):
            salts = [uuid.uuid4().hex] * 3 if kind == "shared" else [uuid.uuid4().hex for _ in TASKS]
            before, cpu = await _counts(session, cluster.metrics_urls), _cpu_seconds(cluster.pid)
            began = time.perf_counter()
            await asyncio.gather(
                *(
                    _ask(session, cluster.url, audio, task, salt, options.tokens)
                    for task, salt in zip(TASKS, salts, strict=True)
                )
            )
            wall, cpu = time.perf_counter() - began, _cpu_seconds(cluster.pid) - cpu
            after = await _counts(session, cluster.metrics_urls)
            if number:
                done = [after[name] - before[name] for name in _COUNTED]
                rounds[kind].append(Round(wall, cpu, *done))
    return rounds


def _sound(seconds: float) -> bytes:
    """Noise of changing loudness, as a WAV file of 16 kHz."""
    rng, out = np.random.default_rng(1), io.BytesIO()
    samples = int(seconds * 16_000)
    wave = 0.2 * rng.standard_normal(samples) * np.abs(np.sin(np.arange(samples) / 9_000))
    soundfile.write(out, wave, 16_000, format="WAV", subtype="PCM_16")
    return out.getvalue()


async def _ask(
    session: aiohttp.ClientSession, url: str, audio: str, task: str, salt: str, tokens: int
) -> None:
    words = ["<|startoftranscript|>", "<|en|>", f"<|{'transcribe' if task == 'times' else task}|>"]
    words += [] if task == "times" else ["<|notimestamps|>"]
    body: dict[str, Any] = {
        "multi_modal_data": {"audio": {"data": audio}},
        "decoder_prompt": [_TEXT + _SPECIALS.index(word) for word in words],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        answer = await reply.json()
    if reply.status != 200 or answer["usage"]["completion_tokens"] != tokens:
        raise SystemExit(f"{reply.status}: {answer}")


async def _counts(session: aiohttp.ClientSession, pages: Sequence[str]) -> dict[str, float]:
    """Encoder outputs and projections so far, over all workers."""
    found = dict.fromkeys(_COUNTED, 0.0)
    for page in pages:
        async with session.get(page) as reply:
            families = text_string_to_metric_families(await reply.text())
        for sample in (sample for family in families for sample in family.samples):
            if sample.name in found:
                found[sample.name] += sample.value
    return found


def _cpu_seconds(pid: int) -> float:
    return sum(usage.cpu for usage in usages([pid]).values())


def report(rounds: dict[str, list[Round]], options: argparse.Namespace) -> str:
    """The results as the committed page has them."""
    names = ("rounds", "seconds", "tokens", "encoders")
    command = "python -m benchmarks encdec_sharing " + " ".join(
        f"--{name} {getattr(options, name):g}" for name in names
    )
    shared, apart = rounds["shared"], rounds["apart"]
    pairs = [a.wall / s.wall for s, a in zip(shared, apart, strict=True)]
    ratio = statistics.median(r.wall for r in apart) / statistics.median(r.wall for r in shared)
    cpu = statistics.median(r.cpu for r in apart) / statistics.median(r.cpu for r in shared)
    lines = [
        "# Three tasks on one sound",
        "",
        f"Command: `{command} --write`",
        f"Date: {datetime.date.today()}. Commit: {commit()}. {os.cpu_count()} cores ({platform.machine()}), "
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, fp32. Load averages at the end: "
        + " ".join(f"{value:.1f}" for value in os.getloadavg())
        + ".",
        "",
        f"A sound of {options.seconds:g} s, a model of Whisper base's shape with random weights, "
        f"{options.encoders} encoder and one PD worker: transcript, translation and transcript with times, "
        f"{options.tokens} tokens each, all asked at once. *Shared*: one `cache_salt`; *apart*: three. "
        "Rounds are interleaved, every salt is new.",
        "",
        f"**Apart takes {ratio:.2f} times as long as shared** (medians; target {TARGET:g}; in the "
        f"{len(pairs)} pairs {min(pairs):.2f} to {max(pairs):.2f}), and {cpu:.2f} times the CPU.",
        "",
        "| | shared: median | least | most | apart: median | least | most |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for title, field, digits in (
        ("seconds until all three are done", "wall", 2),
        ("CPU seconds of all processes", "cpu", 2),
        ("encoder outputs computed", "encoded", 0),
        ("projections", "projected", 0),
    ):
        cells = []
        for kind in (shared, apart):
            values = [getattr(r, field) for r in kind]
            cells += [statistics.median(values), min(values), max(values)]
        lines.append(f"| {title} | " + " | ".join(f"{value:.{digits}f}" for value in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
