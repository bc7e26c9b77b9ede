"""Entries of lists name modules by path, by the end of one, or by a pattern."""

from __future__ import annotations

import pytest

from triptych.models.checkpoint.conversion_lists import ConversionLists

QKV = "model.visual.blocks.1.attn.qkv"


@pytest.mark.parametrize(
    ("entry", "module", "covered"),
    [
        ("model.visual", QKV, True),
        ("visual", QKV, True),
        ("model.visual", "visual.blocks.1", True),
        ("qkv", QKV, True),
        ("attn.qk", QKV, False),
        ("visual.blocks.1", "visual.blocks.11", False),
        ("visual.blocks.*", "visual.blocks.11.mlp", True),
        ("model.visual*", QKV, True),
        ("re:.*visual.*", QKV, True),
        ("re:visual", QKV, True),
        ("re:attn", QKV, False),
        (r"re:.*\.(q|k|v)$", QKV, False),
        ("vis(ual", QKV, False),
        ("vis(ual", "model.vis(ual.a", True),
        ("lm_head", "lm_head", True),
        ("Linear", QKV, False),
    ],
)
def test_an_entry_covers_a_module_and_what_is_in_it(entry, module, covered):
    for field in ("modules_to_not_convert", "ignore"):
        found = ConversionLists({field: ["other", entry]}).unconverted(module)
        assert (found is not None) is covered
        assert not found or str(found) == f"quantization_config.{field} has {entry!r}"


def test_what_is_left_unconverted_is_no_target() -> None:
    groups = {"group_0": {"targets": ["Linear", "re:.*mlp.*"]}, "group_1": None}
    lists = ConversionLists({"config_groups": groups, "ignore": ["re:.*visual.*"]})
    assert lists.converted("model.layers.0.mlp.up_proj")
    assert lists.converted("model.visual.blocks.0.mlp.up_proj") is None
    assert lists.converted("model.layers.0.self_attn.q_proj") is None, "a class is told by no name"


@pytest.mark.parametrize("value", [None, "visual", {"visual": 1}, [None, 3, ""], []])
def test_what_is_no_list_of_names_says_nothing(value):
    lists = ConversionLists({"ignore": value, "config_groups": value, "targets": value})
    assert lists.unconverted(QKV) is None and lists.converted(QKV) is None
