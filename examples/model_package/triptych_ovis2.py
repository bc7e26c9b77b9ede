"""An adapter for Ovis2: the tokens around its pictures are embedded by a table of the vision tower.

The class writes features of its encoder not only over a picture's own tokens, but over the indicator tokens
that begin, part and end it. Here indicators are rows of the picture like all others: the encoder puts them
where they stand, and the decoder needs nothing of the tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from triptych.models.base import PreparedItem
from triptych.models.generic import KEYS
from triptych.models.generic.capture import CapturedPrompt, PromptCapture
from triptych.models.generic.decoder import GenericDecoder
from triptych.models.generic.encoder import GenericEncoder
from triptych.models.generic.layout import ItemLayout

__all__ = ["DECODER", "ENCODER", "KEYS"]


class Ovis2Capture(PromptCapture):
    """The class's own forward, to which indicators are shown as tokens of the picture."""

    #: Read by the class, and used for indicators only, of which it sees none.
    further_features: ClassVar[Mapping[str, Any]] = {"visual_indicator_features": None}

    @classmethod
    def row_tokens(cls, config: Any) -> frozenset[int]:
        return frozenset({int(config.image_token_id), *config.visual_indicator_token_ids})

    def run(
        self,
        token_ids: Sequence[int],
        types: torch.Tensor,
        rows: Sequence[int] = (),
        grids: Mapping[str, torch.Tensor] | None = None,
        *,
        generated: bool = False,
    ) -> CapturedPrompt:
        if rows:
            image, indicators = self.config.image_token_id, self.config.visual_indicator_token_ids
            token_ids = [image if token in indicators else token for token in token_ids]
        return super().run(token_ids, types, rows, grids, generated=generated)


class Ovis2Encoder(GenericEncoder):
    """The tower, whose rows come in the order of the placeholder's tokens, indicators among them."""

    capture_class = Ovis2Capture

    def encode_item(self, item: PreparedItem) -> torch.Tensor:
        config: Any = self.module.config
        # The table's last rows, one for each indicator.
        table: Any = self.module.get_submodule("model.visual_embeddings_table").weight
        indicators = dict(
            zip(
                config.visual_indicator_token_ids,
                table[-config.vision_config.num_visual_indicator_tokens :],
                strict=True,
            )
        )
        picture = iter(super().encode_item(item))
        tokens = ItemLayout.decode(item.layout).tokens
        rows = [
            next(picture) if token == config.image_token_id else indicators[token]
            for token in tokens
            if token in self.row_token_ids
        ]
        return torch.stack(rows)


class Ovis2Decoder(GenericDecoder):
    """The text model as it is."""

    capture_class = Ovis2Capture


ENCODER = Ovis2Encoder
DECODER = Ovis2Decoder
