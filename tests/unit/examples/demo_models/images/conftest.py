"""What the demo model's tests share."""

import pytest
from transformers import PreTrainedTokenizerFast

from examples.demo_models.images.tokens import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """As training makes it."""
    return make_tokenizer()
