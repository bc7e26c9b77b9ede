"""The decoder side that the families share: transformers' text model over a flattened ragged batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.types import ItemPlan
from triptych.models.base import DecoderGeometry, DecoderSide, MergedEmbeds
from triptych.models.checkpoint.folder import Checkpoint
from triptych.models.fused.decoder_layer import FusedDecoderLayer, rotary
from triptych.models.fused.layers import fuse_layers
from triptych.models.parallel.plan import HEAD, WHOLE, ShardPlan, rules_of_transformers, take_share
from triptych.models.parallel.sharding import load_share
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.weights.loading import KeyMap, empty_module


class TextModule(nn.Module):
    """Text model and head: all that a PD worker holds of a checkpoint."""

    model: PreTrainedModel

    def __init__(self, model: nn.Module, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.model = model
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)


class TextDecoder(DecoderSide):
    """The decoder of all decoder-only families; a family names its keys, its text model and its positions."""

    keys: ClassVar[KeyMap]
    position_rows: ClassVar[int] = 1
    module: TextModule
    image_token_id: int
    #: Whether the layers are `FusedDecoderLayer`s.
    _fused = False

    def __init__(
        self, config: PreTrainedConfig, module: TextModule, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.module = module
        self.device = device
        self.dtype = dtype
        self.image_token_id = int(config.image_token_id)
        self.geometry = self.geometry_of(config)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attn_implementation: str,
        quantize: bool = False,
        parallel: TensorParallel | None = None,
    ) -> Self:
        checkpoint = Checkpoint(path)
        cls.keys.check(checkpoint.files)
        config = cls.read_config(path)
        text = config.text_config

        def build() -> nn.Module:
            model = cls.text_model(text, dtype)
            return TextModule(model, text.hidden_size, text.vocab_size)

        module = empty_module(build)
        assert isinstance(module, TextModule)
        tied = cls.keys.tied if config.tie_word_embeddings else ()
        names = cls.keys.decoder_names(checkpoint.files)
        load_share(
            module,
            checkpoint,
            names,
            plan=cls.shard_plan(text),
            parallel=parallel,
            device=device,
            dtype=dtype,
            tied=tied,
            quantize=quantize,
        )
        # Set afterwards: transformers would want the name to be one of its own while it builds.
        module.model.config._attn_implementation = attn_implementation
        side = cls(config, module, device=device, dtype=dtype)
        if parallel is not None:
            take_share(side, parallel)
        return side

    @classmethod
    def without_weights(cls, path: Path, *, dtype: torch.dtype) -> Self:
        config = cls.read_config(path)
        text = config.text_config
        with torch.device("meta"):
            module = TextModule(nn.Identity(), text.hidden_size, text.vocab_size)
        return cls(config, module, device=torch.device("meta"), dtype=dtype)

    @classmethod
    def read_config(cls, path: Path) -> PreTrainedConfig:
        return load_config(path)

    @classmethod
    @abstractmethod
    def text_model(cls, config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
        """The family's text model, without weights."""

    @classmethod
    def shard_plan(cls, config: PreTrainedConfig) -> ShardPlan:
        """How ranks divide the text model of `config`, and its head."""
        return ShardPlan(
            (*rules_of_transformers(cls.tp_plan(config), "model."), *WHOLE, HEAD),
            heads=int(config.num_attention_heads),
            kv_heads=int(config.num_key_value_heads),
        )

    @classmethod
    def tp_plan(cls, config: PreTrainedConfig) -> Mapping[str, str]:
        """transformers' own plan for the text model's layers."""
        return config.base_model_tp_plan or {}

    @abstractmethod
    def rows_of(self, plan: ItemPlan) -> int:
        """Embedding rows that the item's grid gives; InvalidRequest for a grid that cannot be."""

    def placeholder(self, plan: ItemPlan) -> list[int]:
        rows = self.rows_of(plan)
        if plan.rows != rows or plan.length != rows:
            raise InvalidRequest(
                f"item {plan.mm_hash} has {plan.rows} rows for {plan.length} placeholder tokens, "
                f"its grid {plan.grid_thw} gives {rows}",
                param="plan",
            )
        return [self.image_token_id] * rows

    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.module.model.embed_tokens(token_ids)
        return rows

    @torch.no_grad()
    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        merged: MergedEmbeds | None,
        attention: object,
        **_: torch.Tensor,
    ) -> torch.Tensor:
        extra: dict[str, object] = {}
        if merged is not None and merged.index.numel():
            merged = in_batch_order(merged, embeds)
            width = self.geometry.hidden_size
            embeds = embeds.index_copy(0, merged.index, merged.rows[:, :width])
            if not self._fused:
                extra = self.deepstack(merged, embeds.shape[0])
        if self._fused:
            return self._walk(embeds, positions, merged, attention)
        out = self.module.model(
            inputs_embeds=embeds.unsqueeze(0),
            position_ids=self.position_ids(positions),
            use_cache=False,
            attn_metadata=attention,
            **extra,
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden[0]

    def fuse(self) -> None:
        super().fuse()
        layers = self.module.model.layers
        fuse_layers(layers)
        self._fused = isinstance(layers[0], FusedDecoderLayer)

    def _walk(
        self, hidden: torch.Tensor, positions: torch.Tensor, merged: MergedEmbeds | None, attention: object
    ) -> torch.Tensor:
        """`forward` through fused layers. A row's columns beyond its first are levels of deepstack."""
        model = self.module.model
        cos, sin = rotary(model.rotary_emb(hidden[None], self.position_ids(positions)))
        levels = () if merged is None else merged.rows.split(self.geometry.hidden_size, 1)[1:]
        for index, layer in enumerate(model.layers):
            hidden = layer(hidden, cos, sin, attention)
            if merged is not None and index < len(levels):
                hidden = hidden.index_add(0, merged.index, levels[index])
        normed: torch.Tensor = model.norm(hidden)
        return normed

    def position_ids(self, positions: torch.Tensor) -> torch.Tensor:
        """[position_rows, T] as the text model takes them."""
        return positions.unsqueeze(1) if self.position_rows > 1 else positions

    def deepstack(self, merged: MergedEmbeds, tokens: int) -> dict[str, object]:
        """What the text model takes besides the embeddings; nothing where the family has no such levels."""
        return {}

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.module.lm_head(hidden)
        return scores

    @classmethod
    def geometry_of(cls, config: PreTrainedConfig) -> DecoderGeometry:
        text = config.text_config
        return DecoderGeometry(
            num_layers=text.num_hidden_layers,
            num_heads=text.num_attention_heads,
            num_kv_heads=text.num_key_value_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            position_rows=cls.position_rows,
            max_position_embeddings=text.max_position_embeddings,
            deepstack_levels=cls.deepstack_levels(config),
        )

    @classmethod
    def deepstack_levels(cls, config: PreTrainedConfig) -> int:
        """Columns of hidden_size that a row holds beyond its first."""
        return 0


def load_config(path: Path) -> PreTrainedConfig:
    """The checkpoint's config as transformers understands it; ConfigError where it does not."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of many kinds, and of huggingface_hub's own
        reason = " ".join(str(error).split())
        raise ConfigError(f"MODEL={path}: its config.json does not fit its model type: {reason}") from error


def in_batch_order(merged: MergedEmbeds, embeds: torch.Tensor) -> MergedEmbeds:
    """Rows by ascending batch index, as a boolean mask enumerates them, on the batch's device and dtype."""
    index, order = merged.index.to(embeds.device).sort()
    return MergedEmbeds(index=index, rows=merged.rows.to(embeds.device, embeds.dtype)[order])


def one_dimensional(length: int) -> tuple[torch.Tensor, int]:
    """Positions [1, length] of a family that only counts, and their delta, 0."""
    return torch.arange(length).unsqueeze(0), 0


def rows_of_grid(grid: Sequence[int], plan: ItemPlan, merge_size: int) -> int:
    """Embeddings of a (frames, rows, columns) patch grid; InvalidRequest for one that cannot be."""
    if len(grid) != 3 or min(grid) < 1 or grid[1] % merge_size or grid[2] % merge_size:
        raise InvalidRequest(f"item {plan.mm_hash} has an impossible grid {tuple(grid)}", param="plan")
    frames, rows, columns = grid
    return frames * (rows // merge_size) * (columns // merge_size)
