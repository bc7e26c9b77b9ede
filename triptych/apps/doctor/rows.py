"""What --ec-store-rows int8 costs a checkpoint: its logits after rounded rows beside those after its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image

from triptych.apps.doctor.finding import CheckResult, note, ok
from triptych.base.config import format_size
from triptych.base.errors import ConfigError
from triptych.base.types import INT8, ItemPlan
from triptych.ec_connector.base import EncoderOutput
from triptych.ec_connector.int8_rows import packed, rows_of
from triptych.encoder_worker.loading import scales_of
from triptych.models.base import DecoderSide, EncoderSide, MergedEmbeds
from triptych.models.recurrent import RecurrentStates
from triptych.pd_worker.attention.attention import backend_on
from triptych.pd_worker.attention.metadata import AttentionMetadata, PagedKVCache, PrefillSpan
from triptych.pd_worker.frontend.prompt import Prompt, PromptBuilder
from triptych.pd_worker.runner.state_pool import state_tensors

_CHECK = "int8 rows"
_QUESTION = "Describe this picture."
_BLOCK = 16
#: Tokens of each answer.
ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RowsLoss:
    """What one picture's answer loses: for each of its tokens the KL divergence, and whether it stays first.

    `nbytes` and `own_nbytes` are those of the picture's rows in 8 bits, and as the tower makes them.
    """

    divergence: torch.Tensor
    same: torch.Tensor
    nbytes: int
    own_nbytes: int


def check_rows(
    path: Path, folder: str, encoder: EncoderSide, decoder: DecoderSide, prompts: PromptBuilder
) -> CheckResult:
    """The loss over the pictures in `folder`; ConfigError where there are none."""
    scales = scales_of(path, encoder.width)
    if not folder:
        return note(_CHECK, f"{scales} scales a row; their loss is not measured", "give --pictures FOLDER")
    if decoder.cross is not None or "image" not in prompts.modalities:
        return note(_CHECK, f"{scales} scales a row; their loss is measured for models of pictures alone")
    losses = [loss_of(picture, scales, encoder, decoder, prompts) for picture in pictures_in(Path(folder))]
    divergence = torch.cat([loss.divergence for loss in losses])
    same = torch.cat([loss.same for loss in losses])
    nbytes, own = (sum(getattr(loss, name) for loss in losses) for name in ("nbytes", "own_nbytes"))
    mean, most = float(divergence.mean()), float(divergence.max())
    return ok(
        _CHECK,
        f"{format_size(nbytes)} in place of {format_size(own)}; KL of the logits {mean:.2g} nats in the mean "
        f"and {most:.2g} at most, the likeliest token the same at {int(same.sum())} of {len(same)} places, "
        f"over {len(losses)} pictures",
    )


def pictures_in(folder: Path) -> Iterator[Image.Image]:
    """The pictures of a folder, by name; ConfigError where it has none."""
    found = 0
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            picture = Image.open(file).convert("RGB")
        except OSError:
            continue
        found += 1
        yield picture
    if not found:
        raise ConfigError(f"--pictures {folder}: no pictures: name a folder of photographs, like JPEG files")


@torch.inference_mode()
def loss_of(
    picture: Image.Image, scales: int, encoder: EncoderSide, decoder: DecoderSide, prompts: PromptBuilder
) -> RowsLoss:
    """Of the greedy answer to a question about the picture, which both forms of its rows are given."""
    item = encoder.preprocess(picture, {})
    plan = ItemPlan(
        "0" * 64, "0" * 64, "image", item.rows, encoder.width, str(encoder.dtype).removeprefix("torch."),
        item.length, item.runs, item.grid_thw, item.layout,
    )  # fmt: skip
    rows = encoder.encode([item])[0]
    stored = EncoderOutput(replace(plan, dtype=INT8, scales=scales), packed(rows, scales))
    content = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
    prompt = prompts.build(json.dumps([{"role": "user", "content": content}]).encode(), [plan])
    reader = PromptReader(decoder, prompt)
    answer: list[int] = []
    logits = reader.read(rows, [])
    for _ in range(ANSWER_TOKENS - 1):
        answer.append(int(logits[-1].argmax()))
        logits = reader.go_on(answer[-1])
    own = reader.read(rows, answer).log_softmax(-1)
    other = reader.read(rows_of(stored, 0, item.rows), answer).log_softmax(-1)
    divergence = (own.exp() * (own - other)).sum(-1).clamp_min(0)
    return RowsLoss(divergence, own.argmax(-1) == other.argmax(-1), stored.plan.nbytes, plan.nbytes)


class PromptReader:
    """A decoder over one prompt and its answer."""

    def __init__(self, decoder: DecoderSide, prompt: Prompt) -> None:
        self._decoder, self._prompt = decoder, prompt
        self._given = decoder.prompt_inputs(prompt.token_ids, prompt.features)
        places = [feature.placement for feature in prompt.features]
        self._spans = (*self._given.spans, *((place.offset, place.end) for place in places if place.atomic))
        runs = [(place.offset, run) for place in places for run in place.runs or ((0, place.length),)]
        self._index = torch.cat([torch.arange(at + first, at + first + count) for at, (first, count) in runs])
        blocks = -(-(len(prompt.token_ids) + ANSWER_TOKENS) // _BLOCK)
        self._cache = PagedKVCache.of_decoder(decoder, num_blocks=blocks, block_size=_BLOCK)
        self._table = torch.arange(blocks, device=decoder.device)
        self._states: RecurrentStates | None = None
        self._read = 0

    def read(self, rows: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
        """Logits, float32, after the prompt with these rows and after each token of the answer."""
        decoder, tokens, shapes = self._decoder, self._prompt.token_ids, self._decoder.geometry.states
        if shapes:
            self._states = RecurrentStates(state_tensors(shapes, 1, decoder.device), [0])
        self._read = 0
        merged = MergedEmbeds(self._index.to(decoder.device), rows.to(decoder.device, decoder.dtype))
        positions = self._given.positions
        if answer:
            after = torch.arange(len(tokens), len(tokens) + len(answer)) + self._given.delta
            positions = torch.cat([positions, after.expand(len(positions), -1)], dim=1)
        inputs = dict(self._given.inputs)
        for name, generated in decoder.generated_inputs(answer).items() if answer else ():
            inputs[name] = torch.cat([inputs[name], generated])
        hidden = self._forward([*tokens, *answer], positions, merged, inputs)
        return decoder.logits(hidden[len(tokens) - 1 :]).float()

    def go_on(self, token: int) -> torch.Tensor:
        """Logits after one more token."""
        position = torch.full((self._decoder.geometry.position_rows, 1), self._read + self._given.delta)
        inputs = dict(self._decoder.generated_inputs([token]))
        return self._decoder.logits(self._forward([token], position, None, inputs)).float()

    def _forward(
        self,
        tokens: Sequence[int],
        positions: torch.Tensor,
        merged: MergedEmbeds | None,
        inputs: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        decoder, start, count = self._decoder, self._read, len(tokens)
        self._read += count
        device, nothing = decoder.device, self._table[:0]
        attention = AttentionMetadata(
            cache=self._cache,
            slots=torch.arange(start, start + count, device=device),
            num_decodes=0,
            decode_tables=nothing.view(0, 0),
            decode_lengths=nothing,
            prefills=[PrefillSpan(0, count, start, self._table, self._spans)],
            bias=decoder.bias,
            layer_rules=decoder.layer_rules,
            backend=backend_on(device, "auto"),
        )
        attention.states = self._states
        embeds = decoder.embed(torch.tensor(tokens, device=device))
        inputs = {name: each.to(device) for name, each in inputs.items()}
        return decoder.forward(embeds, positions.to(device), merged, attention, **inputs)
