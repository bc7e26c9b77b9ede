"""The largest image by a processor's settings and the limits of flags."""

from __future__ import annotations

import pytest

from triptych.apps.doctor.finding import CheckOutcome
from triptych.apps.doctor.model import largest_image

#: Up to 4096x4096 pixels, a row for 32x32 of them.
QWEN = {"size": {"longest_edge": 1 << 24, "shortest_edge": 1 << 16}, "patch_size": 16, "merge_size": 2}


def test_a_model_whose_largest_image_fits_scales_larger_ones_down():
    result = largest_image(QWEN, {"--max-model-len 32768": 32767, "--encoder-cache-memory 1 GiB": 16384})
    assert result.verdict is CheckOutcome.OK
    assert result.found == "4096x4096 pixels (16384 rows); larger ones are scaled down to it"


def test_the_flag_with_the_fewest_rows_is_named_with_what_a_request_may_ask_for():
    result = largest_image(QWEN, {"--max-model-len 32768": 32767, "--encoder-cache-memory 256 MiB": 8192})
    assert result.verdict is CheckOutcome.NOTE
    assert result.found.startswith("2880x2880 pixels (8192 rows) by --encoder-cache-memory 256 MiB;")
    assert "raise --encoder-cache-memory, or" in result.remedy and "max_pixels 8388608" in result.remedy


def test_limits_without_place_for_a_row_fail():
    assert largest_image(QWEN, {"--max-model-len 1": 0}).verdict is CheckOutcome.FAIL


@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        {"size": {"height": 336, "width": 336}},
    ],
)
def test_a_tower_of_one_size_takes_any_image(settings):
    assert "scaled to 336x336 pixels" in largest_image(settings, {"--max-model-len 9": 8}).found
