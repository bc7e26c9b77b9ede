"""Trains the demo model from nothing: `python -m examples.demo_models.images.train --out DIR --steps 6000`.

DIR holds `run/` (what --resume goes on from) and `model/` (a transformers checkpoint in fp16).
Under `torchrun --nproc-per-node N -m examples.demo_models.images.train ...`, N processes share each step:
on a few cores, N processes of one thread are faster than one of N threads. --batch is of each process.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import defaultdict, deque
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import distributed, nn
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration

from examples.demo_models.images.answers import KINDS
from examples.demo_models.images.batches import (
    IGNORED,
    Batch,
    Encoder,
    collate,
    structured_batch,
    training_batch,
)
from examples.demo_models.images.checkpoint import (
    make_config,
    make_model,
    save_checkpoint,
    use_linear_patches,
)
from examples.demo_models.images.samples import sample_of_kind
from examples.demo_models.images.scenes import COLOURS, SHAPES
from examples.demo_models.images.structured import SENTENCE
from examples.demo_models.images.tokens import make_tokenizer
from examples.demo_models.training_state import TrainingState, rate_at

_WARM_UP = 100  # steps
_READING = 1.0  # weight of the reading loss
_THINGS = len(COLOURS) + 1 + len(SHAPES) + 1


def answer_logits(
    model: Qwen3VLForConditionalGeneration, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [answers' tokens, vocabulary], true tokens, their weights, and the images' [tokens, width]."""
    images = model.model.get_image_features(batch.pixels, batch.grid, return_dict=True)
    hidden = model.model(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        position_ids=batch.positions,
        mm_encoder_outputs={"image": images},
    ).last_hidden_state
    labels = batch.labels[:, 1:]
    learnt = labels != IGNORED
    logits = model.lm_head(hidden[:, :-1][learnt])
    return logits, labels[learnt], batch.weights[:, 1:][learnt], torch.cat(images.pooler_output)


def start_from(model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """A checkpoint's weights; a token that it lacks begins as the word after a space, or its parts' mean."""
    weights = load_file(folder / "model.safetensors")
    old = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        rows = model.get_input_embeddings().weight
        known = old.get_vocab()
        for token, number in tokenizer.get_vocab().items():
            if token not in known:
                spaced = known.get("\u0120" + token)
                parts = old.encode(token, add_special_tokens=False).ids if spaced is None else [spaced]
                rows[number] = rows[parts].mean(0)


def _right_tokens(model: Qwen3VLForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """[tokens of answers that no grammar writes] bool: whether it is the likeliest one."""
    logits, truth, weights, _ = answer_logits(model, batch)
    return (logits.argmax(-1) == truth)[weights >= SENTENCE]


@torch.no_grad()
def quick_check(
    model: Qwen3VLForConditionalGeneration, encoder: Encoder, pad: int, each: int = 6
) -> dict[str, float]:
    """Per kind, the part of held-out answers of which every token is the likeliest; of JSON, of tokens."""
    rng = random.Random(99)
    right: dict[str, list[bool]] = defaultdict(list)
    for kind in KINDS:
        samples = [sample_of_kind(rng, "held_out", kind) for _ in range(each)]
        for sample in samples:
            batch = collate([(encoder.branched(sample), sample.pictures)], pad)
            right[kind].append(bool(_right_tokens(model, batch).all()))
    for _ in range(each):
        right["tokens of JSON"] += _right_tokens(model, structured_batch(rng, encoder, 8, pad)).tolist()
    return {kind: sum(marks) / len(marks) for kind, marks in right.items()}


class Run:
    """The state of one training run; `train` takes it on to the last step."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rank = distributed.get_rank() if distributed.is_initialized() else 0
        torch.manual_seed(arguments.seed)
        self.tokenizer: PreTrainedTokenizerFast = make_tokenizer()
        use_linear_patches()
        self.model = make_model(make_config(self.tokenizer))
        if arguments.start:
            start_from(self.model, self.tokenizer.backend_tokenizer, Path(arguments.start))
        self.encoder = Encoder(self.tokenizer.backend_tokenizer)
        self.pad = int(self.tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        # Reads colours and shapes off the image tokens: only for a second loss, which makes the
        # vision part learn them at once instead of through the answers; it is not exported.
        self.reader = nn.Linear(self.model.config.text_config.hidden_size, _THINGS)
        named = dict(self.model.named_parameters())
        named |= {f"reader.{n}": p for n, p in self.reader.named_parameters()}
        self.state = TrainingState(named, arguments.weight_decay)
        self.folder = Path(arguments.out) / "run"
        if arguments.resume:
            self.state.load(self.folder)

    def save(self) -> None:
        """What the run goes on from, then the export."""
        self.state.save(self.folder, self.arguments.seed)
        with self.state.averaged():
            save_checkpoint(self.model, self.tokenizer, Path(self.arguments.out) / "model")

    def _reading_loss(self, images: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        sizes = [len(COLOURS) + 1, len(SHAPES) + 1]
        colour, shape = torch.split(self.reader(images), sizes, dim=-1)
        loss = nn.functional.cross_entropy(colour, seen[:, 0], ignore_index=IGNORED)
        return loss + nn.functional.cross_entropy(shape, seen[:, 1], ignore_index=IGNORED)

    def one_step(self) -> tuple[float, float]:
        """One batch; returns the loss (nats per answer token) and the reading loss."""
        a, step = self.arguments, self.state.step
        rng = random.Random(f"{a.seed}:{step}:{self.rank}")
        batch = training_batch(
            rng, self.encoder, a.batch, a.branches, max(a.curriculum, step / a.steps), self.pad
        )
        logits, truth, weights, images = answer_logits(self.model, batch)
        loss = nn.functional.cross_entropy(logits, truth, reduction="none") @ weights / weights.sum()
        reading = self._reading_loss(images, batch.seen)
        (loss + _READING * reading).backward()
        self.state.learn(rate_at(step, a.steps, a.rate, a.decayed, _WARM_UP))
        return loss.item(), reading.item()

    def report(self, loss: float, started: float) -> None:
        with self.state.averaged():
            marks = quick_check(self.model, self.encoder, self.pad)
        mean = sum(marks.values()) / len(marks)
        kinds = " ".join(f"{kind}={mark:.2f}" for kind, mark in marks.items())
        spent = time.monotonic() - started
        print(f"{self.state.step} loss {loss:.4f} right {mean:.3f} {spent:.0f}s {kinds}", flush=True)

    def train(self) -> None:
        started, losses = time.monotonic(), deque[tuple[float, float]](maxlen=50)
        while self.state.step < self.arguments.steps:
            losses.append(self.one_step())
            mean, reading = (sum(column) / len(losses) for column in zip(*losses, strict=True))
            last = self.state.step == self.arguments.steps
            if self.rank:
                continue
            if self.state.step % 50 == 0:
                print(
                    f"{self.state.step} {mean:.4f} {reading:.4f} {time.monotonic() - started:.0f}s",
                    flush=True,
                )
            if self.state.step % self.arguments.save_every == 0 or last:
                self.save()
                self.report(mean, started)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default_out = str(Path(tempfile.gettempdir()) / "triptych-demo")
    parser.add_argument("--out", default=default_out, help="folder for run/ and model/")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--resume", action="store_true", help="go on from the last state in --out")
    parser.add_argument("--start", help="checkpoint folder whose weights the run begins with")
    parser.add_argument(
        "--curriculum", type=float, default=0.0, help="part of it that is behind the run, 0..1"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8, help="picture sets a step")
    parser.add_argument("--branches", type=int, default=4, help="questions a picture set")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--decayed", type=float, default=0.3, help="last part of falling rate")
    parser.add_argument("--save-every", type=int, default=250, help="steps")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch decides")
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    if "WORLD_SIZE" in os.environ:
        distributed.init_process_group("gloo")
    Run(arguments).train()
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
