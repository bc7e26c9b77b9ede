"""Cross-attention of a decoder that computes queries only: keys and values were projected once, elsewhere."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

#: What most families call the four projections; T5 has letters.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class CrossAttention(nn.Module):
    """A cross-attention module with the projections of transformers' own, under their names.

    The registered attention function gets query [1, heads, T, dim], and None for key and value: they are in
    the item's cross blocks. `is_cross` marks the module.
    """

    is_cross = True

    def __init__(
        self,
        original: nn.Module,
        *,
        layer_idx: int,
        head_dim: int,
        scaling: float,
        config: PreTrainedConfig,
        names: tuple[str, str, str, str] = PROJECTIONS,
        scale_query: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = head_dim
        self.scaling = scaling
        self._names = names
        #: Whisper multiplies the query, not the scores: in low precision that is another number.
        self._scale_query = scale_query
        for name in names:
            setattr(self, name, getattr(original, name))

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        """[1, T, hidden] to [1, T, hidden]; only `attn_metadata` of the keywords counts."""
        shape = hidden_states.shape[:-1]
        query = self._projection(0)(hidden_states)
        if self._scale_query:
            query = query * self.scaling
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(
            self,
            query.view(*shape, -1, self.head_dim).transpose(1, 2),
            None,
            None,
            None,
            scaling=1.0 if self._scale_query else self.scaling,
            attn_metadata=kwargs["attn_metadata"],
        )
        return self._projection(3)(out.reshape(*shape, -1)), None

    def project(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, heads, dim] of encoder rows [R, width]."""
        key, value = self._projection(1)(rows), self._projection(2)(rows)
        return key.view(len(rows), -1, self.head_dim), value.view(len(rows), -1, self.head_dim)

    def _projection(self, number: int) -> nn.Module:
        return self.get_submodule(self._names[number])
