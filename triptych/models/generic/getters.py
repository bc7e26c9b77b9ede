"""The getter of features that Qwen2-Audio lacks: its forward computes them itself."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2AudioForConditionalGeneration, Qwen2AudioModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling


class _Qwen2AudioBase(Qwen2AudioModel):  # type: ignore[misc]
    """The base in the form of other classes: a getter, and a forward that puts its rows over placeholders."""

    def get_audio_features(
        self, input_features: torch.Tensor, feature_attention_mask: torch.Tensor, **_: Any
    ) -> BaseModelOutputWithPooling:
        tower = self.audio_tower
        frames, counts = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
        length = (input_features.shape[-1] - 2) // 2 + 1
        mask = create_bidirectional_mask(
            config=tower.config,
            inputs_embeds=input_features.new_zeros(len(input_features), length, 1),
            attention_mask=_first(frames, length).long(),
        )
        rows = self.multi_modal_projector(tower(input_features, attention_mask=mask).last_hidden_state)
        return BaseModelOutputWithPooling(pooler_output=rows[_first(counts, rows.shape[1])])

    def forward(
        self,
        input_ids: torch.Tensor,
        input_features: torch.Tensor | None = None,
        feature_attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        embeds = self.get_input_embeddings()(input_ids)
        if input_features is not None:
            rows: Any = self.get_audio_features(input_features, feature_attention_mask)
            embeds = embeds.masked_scatter(
                (input_ids == self.config.audio_token_id)[..., None], rows.pooler_output
            )
        return self.language_model(inputs_embeds=embeds, **kwargs)


class _Qwen2Audio(Qwen2AudioForConditionalGeneration):  # type: ignore[misc]
    """The class around that base."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.__class__ = _Qwen2AudioBase

    def get_audio_features(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
        return self.model.get_audio_features(*args, **kwargs)


# transformers knows the names of a checkpoint's tensors by those of the class and its module.
for _own in (_Qwen2AudioBase, _Qwen2Audio):
    _own.__name__, _own.__module__ = _own.__base__.__name__, _own.__base__.__module__


def with_getter(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class itself, or one with the same weights that has a getter for its items' features."""
    lacks = cls is Qwen2AudioForConditionalGeneration and not hasattr(Qwen2AudioModel, "get_audio_features")
    return _Qwen2Audio if lacks else cls


def _first(counts: torch.Tensor, length: int) -> torch.Tensor:
    """bool [N, length]: the first `counts` of each row."""
    return torch.arange(length, device=counts.device)[None] < counts[:, None]
