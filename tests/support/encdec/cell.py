"""Requests of an encoder-decoder model for an engine; the encoder's rows come from transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from support.encdec.oracle import Inputs, encoder_rows
from support.engine.engine_cell import EngineCell
from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.ec_connector.base import EncoderOutput
from triptych.models.base import DecoderSide, LogitsRule
from triptych.models.registry import generation_defaults, load_decoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.core.request import EngineRequest


@dataclass
class EncDecCheckpoint:
    """The decoder side of a tiny checkpoint, and encoder outputs as transformers computes them."""

    path: Path
    decoder: DecoderSide
    _rows: dict[str, EncoderOutput] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, dtype: torch.dtype = torch.float32, *, device: str = "cpu") -> EncDecCheckpoint:
        options: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}
        return cls(path, load_decoder(path, **options, attn_implementation=ATTENTION_NAME))

    def output(self, inputs: Inputs) -> EncoderOutput:
        """The encoder's rows for these inputs, under a key that follows from them."""
        (tensor,) = inputs.values()
        key = hashlib.sha256(self.path.name.encode() + tensor.numpy().tobytes()).hexdigest()
        if key not in self._rows:
            rows = encoder_rows(self.path, inputs).contiguous()
            modality = type(self.decoder).modality
            plan = ItemPlan(key, "n" * 64, modality, rows.shape[0], rows.shape[1], "float32", 0)
            self._rows[key] = EncoderOutput(plan, rows)
        return self._rows[key]

    def request(
        self,
        cell: EngineCell,
        inputs: Inputs,
        decoder_ids: Sequence[int],
        max_tokens: int,
        *,
        rules: tuple[LogitsRule, ...] | None = None,
        publish: bool = True,
    ) -> EngineRequest:
        """A greedy request; with `publish` its rows are in the store. `rules` None: the checkpoint's."""
        if rules is None:
            rules = self.decoder.logits_rules(generation_defaults(self.path), {"max_tokens": max_tokens})
        output = self.output(inputs)
        if publish:
            cell.store[output.plan.mm_hash] = output
        positions, delta = self.decoder.positions(decoder_ids, ())
        features = [MMFeature(output.plan, Placement(0, 0))]
        return cell.build(
            decoder_ids, features, max_tokens, positions, delta, ready=publish, logits_rules=rules
        )
