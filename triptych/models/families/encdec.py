"""The decoder side that encoder-decoder families share: self-attention paged, cross-attention by item."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from triptych.base.errors import InvalidRequest
from triptych.base.types import ItemPlan, MMFeature, Options
from triptych.models.base import DecoderSide, GenerationDefaults, LogitsRule, MergedEmbeds, PromptDefaults
from triptych.models.checkpoint.config import load_config
from triptych.models.checkpoint.tensors import Checkpoint
from triptych.models.defaults import generation_defaults
from triptych.models.families.cross_attention import CrossAttention
from triptych.models.families.logits_rules import checkpoint_rules
from triptych.models.geometry import CrossGeometry, DecoderGeometry
from triptych.models.parallel.plan import HEAD, WHOLE, ShardPlan, Style, take_share
from triptych.models.parallel.sharding import load_share
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.weights.loading import KeyMap, empty_module


class DecoderModule(nn.Module):
    """Decoder stack and head: all that a PD worker holds of a checkpoint."""

    decoder: PreTrainedModel
    final_logits_bias: torch.Tensor | None

    def __init__(self, decoder: nn.Module, width: int, vocab_size: int, *, biased: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.register_buffer("final_logits_bias", torch.zeros(1, vocab_size) if biased else None)


class EncDecDecoder(DecoderSide):
    """The decoder of encoder-decoder families, which add their keys, their stack and the walk of its layers.

    `layers` are walked here and not by transformers' stack, which would count positions by itself and
    project encoder rows again.
    """

    modality: ClassVar[str] = "text"
    #: Whether cross-attention multiplies its query, not its scores.
    scale_query: ClassVar[bool] = False
    #: How ranks divide the layers between embeddings and head; those of BART, after which most are made.
    shard_rules: ClassVar[tuple[tuple[str, Style], ...]] = (
        (r".+_attn\.[qkv]_proj", Style.HEADS),
        (r".+_attn\.out_proj", Style.HEADS_ROW),
        (r".+\.fc1", Style.COLUMN),
        (r".+\.fc2", Style.ROW),
    )
    keys: ClassVar[KeyMap]
    #: transformers' class of the stack.
    stack_class: ClassVar[type[PreTrainedModel]]
    module: DecoderModule
    cross: CrossGeometry
    image_token_id = None

    def __init__(
        self,
        config: PreTrainedConfig,
        module: DecoderModule,
        generation: GenerationDefaults,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.module = module
        self.generation = generation
        self.device = device
        self.dtype = dtype
        self.geometry = self.geometry_of(config)
        self.cross = self.cross_of(config)

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
        names = cls.keys.decoder_names(checkpoint.files)
        biased = "final_logits_bias" in names.values()

        def build() -> nn.Module:
            stack = cls.stack(config, dtype)
            cls.replace_cross_attention(stack)
            return DecoderModule(stack, config.d_model, cls.vocab_size(config), biased=biased)

        module = empty_module(build)
        assert isinstance(module, DecoderModule)
        load_share(
            module,
            checkpoint,
            names,
            plan=cls.shard_plan(config),
            parallel=parallel,
            device=device,
            dtype=dtype,
            tied=cls.keys.tied,
            computed=cls.computed(module.decoder),
            quantize=quantize,
        )
        # Set afterwards: transformers would want the name to be one of its own while it builds.
        module.decoder.config._attn_implementation = attn_implementation
        side = cls(config, module, generation_defaults(path), device=device, dtype=dtype)
        if parallel is not None:
            take_share(side, parallel)
        return side

    @classmethod
    def read_config(cls, path: Path) -> PreTrainedConfig:
        return load_config(path)

    @classmethod
    def stack(cls, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """The family's decoder stack, without weights."""
        stack: PreTrainedModel = cls.stack_class._from_config(config, dtype=dtype, attn_implementation="sdpa")
        return stack

    @classmethod
    def replace_cross_attention(cls, stack: PreTrainedModel) -> None:
        """Puts a `CrossAttention` in place of each module that attends to encoder rows; as BART has them."""
        for index, layer in enumerate(stack.layers):
            original = layer.encoder_attn
            layer.encoder_attn = CrossAttention(
                original,
                layer_idx=index,
                head_dim=original.head_dim,
                scaling=original.scaling,
                config=stack.config,
                scale_query=cls.scale_query,
            )

    @classmethod
    def shard_plan(cls, config: PreTrainedConfig) -> ShardPlan:
        """How ranks divide the stack and its head."""
        heads, _ = cls.heads(config)
        return ShardPlan((*cls.shard_rules, *WHOLE, HEAD), heads=heads, kv_heads=heads)

    @classmethod
    def computed(cls, stack: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Tensors by name that checkpoints may leave out, since every model computes them itself."""
        return {}

    @classmethod
    def vocab_size(cls, config: PreTrainedConfig) -> int:
        """Tokens of the decoder's vocabulary."""
        return int(config.vocab_size)

    @classmethod
    def cross_width(cls, config: PreTrainedConfig) -> int:
        """Columns of an encoder row."""
        return int(config.d_model)

    @classmethod
    def max_rows(cls, config: PreTrainedConfig) -> int | None:
        """Positions that the encoder has; None where it does not count them."""
        return int(config.max_position_embeddings)

    @abstractmethod
    def walk(self, hidden: torch.Tensor, positions: torch.Tensor, attention: object) -> torch.Tensor:
        """Hidden states [1, T, hidden] of token embeddings [1, T, hidden] at positions [T]."""

    def cross_modules(self) -> list[CrossAttention]:
        """The cross-attention of every layer, in order."""
        return [layer.encoder_attn for layer in self.module.decoder.layers]

    def placeholder(self, plan: ItemPlan) -> list[int]:
        maximum = self.cross.max_rows
        if (
            plan.length
            or plan.width != self.cross.width
            or plan.rows < 1
            or (maximum and plan.rows > maximum)
        ):
            rows = f"up to {maximum}" if maximum else "any number of"
            raise InvalidRequest(
                f"item {plan.mm_hash} is {plan.rows}x{plan.width} for {plan.length} placeholder tokens: "
                f"this model takes {rows} rows of {self.cross.width} and no placeholder",
                param="plan",
            )
        return []

    def positions(self, token_ids: Sequence[int], features: Sequence[MMFeature]) -> tuple[torch.Tensor, int]:
        return torch.arange(len(token_ids))[None], 0

    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.module.decoder.embed_tokens(token_ids)
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
        assert merged is None or not merged.index.numel(), "encoder rows reach this model by cross-attention"
        return self.walk(embeds.unsqueeze(0), positions[0], attention)[0]

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.module.lm_head(hidden)
        bias = self.module.final_logits_bias
        return scores if bias is None else scores + bias

    @torch.no_grad()
    def project_cross(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows = rows.to(self.device, self.dtype)
        return [module.project(rows) for module in self.cross_modules()]

    def prompt_defaults(self, options: Options) -> PromptDefaults:
        start = self.start_token()
        first = self.generation.extra.get("forced_bos_token_id")
        # `generate` begins with the start token and forces the next one: here both are prompt.
        return PromptDefaults(start, (start,) if first is None else (start, int(first)))

    def start_token(self) -> int:
        """The token that begins every decoder prompt, by generation_config, else by config."""
        first = self.generation.extra.get("decoder_start_token_id")
        for value in (first, getattr(self.config, "decoder_start_token_id", None), self.config.bos_token_id):
            if value is not None:
                return int(value[0] if isinstance(value, list) else value)
        return 0

    def logits_rules(self, defaults: GenerationDefaults, options: Options) -> tuple[LogitsRule, ...]:
        return checkpoint_rules(defaults, options)

    @classmethod
    def heads(cls, config: PreTrainedConfig) -> tuple[int, int]:
        """Heads of the decoder, and the elements of one."""
        heads = int(config.decoder_attention_heads)
        return heads, int(config.d_model) // heads

    @classmethod
    def num_layers(cls, config: PreTrainedConfig) -> int:
        """Layers of the decoder."""
        return int(config.decoder_layers)

    @classmethod
    def max_positions(cls, config: PreTrainedConfig) -> int:
        """Tokens of the decoder, prompt and output."""
        return int(config.max_position_embeddings)

    @classmethod
    def cross_of(cls, config: PreTrainedConfig) -> CrossGeometry:
        heads, head_dim = cls.heads(config)
        return CrossGeometry(
            num_layers=cls.num_layers(config),
            num_kv_heads=heads,
            head_dim=head_dim,
            width=cls.cross_width(config),
            max_rows=cls.max_rows(config),
        )

    @classmethod
    def geometry_of(cls, config: PreTrainedConfig) -> DecoderGeometry:
        heads, head_dim = cls.heads(config)
        return DecoderGeometry(
            num_layers=cls.num_layers(config),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            hidden_size=int(config.d_model),
            vocab_size=cls.vocab_size(config),
            position_rows=1,
            max_position_embeddings=cls.max_positions(config),
        )
