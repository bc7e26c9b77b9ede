"""The adapter for any image-text-to-text class of transformers that has no family of its own."""

from triptych.models.generic.decoder import GenericDecoder
from triptych.models.generic.encoder import GenericEncoder
from triptych.models.weights.loading import KeyMap

ENCODER = GenericEncoder
DECODER = GenericDecoder
#: Only to tell a tower's tensors, which are digested whole, from a decoder's. A key that belongs to neither
#: by its name counts as the tower's.
KEYS = KeyMap(
    encoder=(
        (
            r"^(?!.*(language_model|text_model|lm_head|embed_tokens|embedding_proj_layer)|model\.(layers|norm)\.)",
            "",
        ),
    )
)
