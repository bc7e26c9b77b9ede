"""Text models with recurrent layers, as decoders of an engine: tiny, with weights that make states matter."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DynamicCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from triptych.models.base import DecoderGeometry, DecoderSide, MergedEmbeds
from triptych.models.generic.probe import PROBE
from triptych.models.recurrent import RecurrentStates, StateRecorder, cache_keyword, learn_states
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.attention.metadata import AttentionMetadata

VOCABULARY = 256
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8}
#: Each with attention between recurrent layers.
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_5": lambda: Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(**SIZES, **DELTA, linear_num_value_heads=4, num_hidden_layers=4)
    ),
    "lfm2": lambda: Lfm2ForCausalLM(
        Lfm2Config(
            **SIZES,
            conv_L_cache=3,
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "conv"],
            block_auto_adjust_ff_dim=False,
        )
    ),
    "nemotron_h": lambda: NemotronHForCausalLM(
        NemotronHConfig(**SIZES, **MAMBA, layers_block_type=["mamba", "attention", "mamba"])
    ),
}


@functools.cache
def hybrid_model(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in key:
            parameter.copy_(torch.randn_like(parameter) * 1.2 / parameter[0].numel() ** 0.5)
        elif parameter.ndim > 1:
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


@torch.no_grad()
def generated(name: str, token_ids: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of transformers' own forward with its own cache, the prompt in one piece."""
    model, tokens, out = hybrid_model(name), list(token_ids), list[int]()
    cache = DynamicCache(config=model.config)
    while len(out) < count:
        logits = model(torch.tensor([tokens]), use_cache=True, **{cache_keyword(model.forward): cache}).logits
        tokens = [int(logits[0, -1].argmax())]
        out += tokens
    return out


class HybridDecoder(DecoderSide):
    """Text alone; its states are learnt as those of any other model."""

    image_token_id = None

    def __init__(self, name: str) -> None:
        self.module = self._model = copy.deepcopy(hybrid_model(name))
        self._text, self._config = self._model.get_decoder(), self._model.config
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._cache = cache_keyword(self._text.forward)
        kinds = getattr(self._config, "layer_types", None) or self._config.layers_block_type
        recurrent = [i for i, kind in enumerate(kinds) if kind not in ("full_attention", "attention")]
        self._config._attn_implementation = PROBE
        states = learn_states(self._probe, recurrent)
        self._config._attn_implementation = ATTENTION_NAME
        self.geometry = DecoderGeometry(
            num_layers=len(kinds),
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            hidden_size=64,
            vocab_size=VOCABULARY,
            position_rows=1,
            max_position_embeddings=512,
            states=states,
        )

    @torch.no_grad()
    def _probe(self, states: StateRecorder) -> None:
        positions = torch.arange(2)[None]
        embeds = torch.zeros(1, 2, 64)
        given = {"position_ids": positions, "use_cache": False, "attn_metadata": {}, self._cache: states}
        self._text(inputs_embeds=embeds, **given)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._model.get_input_embeddings()(token_ids)
        return rows

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        merged: MergedEmbeds | None,
        attention: object,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        assert isinstance(attention, AttentionMetadata)
        assert isinstance(attention.states, RecurrentStates)
        tokens = len(embeds)
        shape = (tokens, 1) if attention.num_decodes else (1, tokens)
        out = self._text(
            inputs_embeds=embeds.view(*shape, -1),
            position_ids=positions.view(shape),
            use_cache=False,
            attn_metadata=attention,
            **{self._cache: attention.states},
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden.reshape(tokens, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        return logits

    def placeholder(self, plan: Any) -> list[int]:
        raise NotImplementedError

    def positions(self, token_ids: Sequence[int], features: Sequence[Any]) -> tuple[torch.Tensor, int]:
        return torch.arange(len(token_ids))[None], 0

    @classmethod
    def read_config(cls, path: Path) -> Any:
        raise NotImplementedError

    @classmethod
    def geometry_of(cls, config: Any) -> DecoderGeometry:
        raise NotImplementedError

    @classmethod
    def load(cls, path: Path, **options: Any) -> DecoderSide:
        raise NotImplementedError


@dataclass
class HybridCheckpoint:
    """What `engine_cell` takes in place of a checkpoint."""

    decoder: HybridDecoder
    path: Path = Path("none")
