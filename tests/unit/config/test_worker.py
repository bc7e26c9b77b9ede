"""Values that workers derive from their flags."""

from __future__ import annotations

import pytest

from triptych.base.config import EncoderConfig


@pytest.mark.parametrize(
    ("flags", "patches"), [({}, 512), ({"device": "cuda:1"}, 16384), ({"encoder_batch_patches": 7}, 7)]
)
def test_encoder_batches_are_small_where_a_picture_keeps_the_device_busy(flags, patches):
    assert EncoderConfig(**flags).batch_patches == patches
