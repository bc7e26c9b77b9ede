"""Trains the audio demo from nothing: `python -m examples.demo_models.audio.train --out DIR`.

DIR holds `run/` (what --resume goes on from) and `model/` (a transformers checkpoint in fp16).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from examples.demo_models.audio.batches import IGNORED, Batch, LogMel, Writer, collate, training_batch
from examples.demo_models.audio.checkpoint import make_model, save_checkpoint
from examples.demo_models.audio.recordings import WINDOW_SECONDS, random_recording, sound
from examples.demo_models.audio.tokens import make_tokenizer
from examples.demo_models.training_state import TrainingState, rate_at
from triptych.demo.tones import DIGITS, LONGEST, RATE

_WARM_UP = 50  # steps
_READING = 0.5  # weight of the reading loss
_SHORT_PART = 0.35  # of the run, in windows of half the length


def encode(encoder: Any, features: torch.Tensor) -> torch.Tensor:
    """[batch, mels, frames] to [batch, frames / 2, width]; windows may be shorter than the model's."""
    hidden = functional.gelu(encoder.conv1(features))
    hidden = functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
    hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
    for layer in encoder.layers:
        out = layer(hidden, None)
        hidden = out[0] if isinstance(out, tuple) else out
    normed: torch.Tensor = encoder.layer_norm(hidden)
    return normed


def held_out_batch(writer: Writer, log_mel: LogMel, size: int) -> Batch:
    """Recordings that training never makes, of 3 to 8 digits."""
    random = np.random.default_rng(99)
    recordings = [random_recording(random, 3 + index % 6, kept_out=True) for index in range(size)]
    waveforms = np.zeros((size, WINDOW_SECONDS * RATE), dtype=np.float32)
    for row, recording in enumerate(recordings):
        heard = sound(recording)
        waveforms[row, : len(heard)] = heard
    return collate(
        recordings, log_mel(torch.from_numpy(waveforms)), writer, [index % 4 > 1 for index in range(size)]
    )


class Run:
    """The state of one training run; `train` takes it on to the last step."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        torch.manual_seed(arguments.seed)
        self.tokenizer = make_tokenizer()
        self.model = make_model(self.tokenizer)
        self.writer, self.log_mel = Writer(self.tokenizer), LogMel()
        # Reads the digit, and how many began before, off the encoder's rows: only for a second loss, by
        # which the encoder learns them at once instead of through the answers; it is not exported.
        self.reader = nn.Linear(self.model.config.d_model, len(DIGITS) + 1 + LONGEST + 1)
        named = dict(self.model.named_parameters())
        named |= {f"reader.{n}": p for n, p in self.reader.named_parameters()}
        self.state = TrainingState(named, arguments.weight_decay)
        self.folder = Path(arguments.out) / "run"
        if arguments.resume:
            self.state.load(self.folder)

    @cached_property
    def held_out(self) -> Batch:
        return held_out_batch(self.writer, self.log_mel, 96)

    def save(self) -> None:
        """What the run goes on from, then the export."""
        self.state.save(self.folder, self.arguments.seed)
        with self.state.averaged():
            save_checkpoint(self.model, self.tokenizer, Path(self.arguments.out) / "model")

    def batch_of(self, step: int) -> Batch:
        a = self.arguments
        random = np.random.default_rng((a.seed, step))
        short = step < _SHORT_PART * a.steps
        seconds, longest = (WINDOW_SECONDS / 2, 4) if short else (WINDOW_SECONDS, LONGEST)
        size = a.batch * 2 if short else a.batch
        return training_batch(random, self.writer, self.log_mel, size, seconds, longest)

    def _batches(self) -> Iterator[Batch]:
        """One is made while another is learnt from."""
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(self.batch_of, self.state.step)
            for step in range(self.state.step, self.arguments.steps):
                batch = following.result()
                following = pool.submit(self.batch_of, step + 1)
                yield batch

    def logits(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the answers [batch, length, vocabulary], and of the rows [batch, rows, digits and counts]."""
        rows = encode(self.model.model.encoder, batch.features)
        out = self.model.model.decoder(input_ids=batch.ids, encoder_hidden_states=rows, use_cache=False)
        return self.model.proj_out(out.last_hidden_state), self.reader(rows)

    def one_step(self, batch: Batch) -> tuple[float, float, float]:
        """Learns one batch; the loss (nats per token) and those of digits and counts (nats per row)."""
        logits, read = self.logits(batch)
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
        digit, count = torch.split(read, [len(DIGITS) + 1, LONGEST + 1], dim=-1)
        reading = functional.cross_entropy(digit.flatten(0, 1), batch.digit.flatten())
        counting = functional.cross_entropy(count.flatten(0, 1), batch.count.flatten())
        (loss + _READING * (reading + counting)).backward()
        a = self.arguments
        self.state.learn(rate_at(self.state.step, a.steps, a.rate, a.decayed, _WARM_UP))
        return loss.item(), reading.item(), counting.item()

    @torch.no_grad()
    def quick_check(self) -> tuple[float, float]:
        """Parts of held-out recordings whose every token but times is the likeliest: without times, with."""
        with self.state.averaged():
            said = self.logits(self.held_out)[0].argmax(-1)
        labels = self.held_out.labels
        first_time = int(self.tokenizer.convert_tokens_to_ids("<|0.00|>"))
        right = ((said == labels) | (labels == IGNORED) | (labels >= first_time)).all(dim=1)
        timed = torch.tensor([index % 4 > 1 for index in range(len(right))])
        return right[~timed].float().mean().item(), right[timed].float().mean().item()

    def train(self) -> None:
        a = self.arguments
        started, losses = time.monotonic(), deque[tuple[float, ...]](maxlen=50)
        for batch in self._batches():
            losses.append(self.one_step(batch))
            if self.state.step % 50 == 0:
                means = " ".join(f"{sum(column) / len(losses):.4f}" for column in zip(*losses, strict=True))
                print(f"{self.state.step} {means} {time.monotonic() - started:.0f}s", flush=True)
            if self.state.step % a.save_every == 0 or self.state.step == a.steps:
                self.save()
                plain, timed = self.quick_check()
                print(f"{self.state.step} right {plain:.3f}, with times {timed:.3f}", flush=True)


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    default_out = str(Path(tempfile.gettempdir()) / "triptych-audio-demo")
    parser.add_argument("--out", default=default_out, help="folder for run/ and model/")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--resume", action="store_true", help="go on from the last state in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16, help="recordings a step")
    parser.add_argument("--rate", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--decayed", type=float, default=0.4, help="last part of falling rate")
    parser.add_argument("--save-every", type=int, default=200, help="steps")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    torch.set_flush_denormal(True)
    Run(arguments_of(argv)).train()


if __name__ == "__main__":
    main()
