"""A rank's share of a checkpoint: its parts, their bytes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from support.data.checkpoints import FAMILIES, build_checkpoint, edit_text_config
from support.encdec.checkpoints import FAMILIES as ENCDEC_FAMILIES
from support.parallel.batches import open_decoder
from triptych.base.errors import ConfigError
from triptych.models.base import DecoderSide
from triptych.models.checkpoint.tensors import Checkpoint
from triptych.models.parallel.sharding import RowParallelLinear, TiedRows, VocabularyParallelHead
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.registry import family_of
from triptych.models.weights.loading import parameter_bytes
from triptych.models.weights.prepack import PrepackedLinear
from triptych.models.weights.quantization import decoder_is_quantized

ALL = [(family, "even" if family == "t5" else "") for family in (*FAMILIES, *ENCDEC_FAMILIES)]


def share(path: Path, rank: int, size: int, quantization: str = "none") -> DecoderSide:
    return open_decoder(path, "float32", quantization, TensorParallel(rank, size))


def loaded(path: Path, quantization: str, parallel: TensorParallel | None = None) -> DecoderSide:
    """As it is loaded, before layers are fused."""
    return family_of(path).decoder.load(
        path,
        device=torch.device("cpu"),
        dtype=torch.float32,
        attn_implementation="sdpa",
        quantize=decoder_is_quantized(quantization),
        parallel=parallel,
    )


def parameters(side: DecoderSide) -> dict[str, torch.Tensor]:
    """By the names of a side that is not divided; of a tied head the rows that are used."""
    found = {}
    for name, parameter in side.module.named_parameters(remove_duplicate=False):
        owner = side.module.get_submodule(name.rpartition(".")[0])
        used = parameter[owner._first : owner._last] if isinstance(owner, TiedRows) else parameter
        found[name.replace(".linear.", ".")] = used.detach().to_dense()
    return found


def joined(parts: list[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """The parts side by side in the dimension in which they are smaller; of equal neighbours one."""
    dims = [dim for dim in range(whole.dim()) if parts[0].shape[dim] != whole.shape[dim]]
    if not dims:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    [dim] = dims
    alike = len(parts) * parts[0].shape[dim] // whole.shape[dim]
    return torch.cat(parts[:: max(1, alike)], dim=dim)


@pytest.mark.parametrize(("size", "quantization"), [(2, "none"), (4, "int8")])
@pytest.mark.parametrize(("family", "variant"), ALL)
def test_the_ranks_parts_together_are_the_checkpoint(family, variant, size, quantization):
    path = build_checkpoint(family, variant=variant)
    whole = parameters(loaded(path, quantization))
    ranks = [parameters(loaded(path, quantization, TensorParallel(rank, size))) for rank in range(size)]
    assert all(rank.keys() == whole.keys() for rank in ranks)
    for name, tensor in whole.items():
        assert torch.equal(joined([rank[name] for rank in ranks], tensor), tensor), name


@pytest.mark.parametrize(("family", "variant"), ALL)
def test_a_rank_of_two_holds_half_of_every_matrix_and_the_embeddings_whole(family: str, variant: str) -> None:
    path = build_checkpoint(family, variant=variant)
    side, part = open_decoder(path, "float32", "none"), share(path, 0, 2)
    table = (nn.Embedding, nn.LayerNorm)
    small = sum(
        p.numel() * 4
        for name, p in side.module.named_parameters()
        if p.dim() == 1 or isinstance(side.module.get_submodule(name.rpartition(".")[0]), table)
    )
    divided = parameter_bytes(side.module) - small
    assert parameter_bytes(part.module) - small == pytest.approx(divided / 2, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_is_rows_of_the_embedding_and_no_copy(family: str) -> None:
    side = share(build_checkpoint(family, variant="tied"), 1, 2)
    head = side.module.get_submodule("lm_head")
    assert isinstance(head, VocabularyParallelHead)
    assert isinstance(head.linear, TiedRows)
    assert head.linear.weight is side.module.get_parameter("model.language_model.embed_tokens.weight")


@pytest.mark.parametrize("variant", ["", "tied"])
def test_the_geometry_and_the_bias_of_a_rank_are_those_of_its_heads(variant: str) -> None:
    path = build_checkpoint("t5", variant=f"even+{variant}".rstrip("+"))
    whole, side = open_decoder(path, "float32", "none"), share(path, 1, 2)
    assert (side.geometry.num_heads, side.geometry.num_kv_heads, side.geometry.head_dim) == (2, 2, 16)
    assert side.cross.num_kv_heads == 2
    assert torch.equal(side.bias, whole.bias[2:])


def test_one_rank_alone_is_loaded_as_without_ranks() -> None:
    side = share(build_checkpoint("bart"), 0, 1)
    kinds = (RowParallelLinear, VocabularyParallelHead)
    assert not any(isinstance(part, kinds) for part in side.module.modules())
    assert side.geometry.num_heads == 4


@pytest.mark.usefixtures("prepack_all")
def test_shares_are_prepacked() -> None:
    side = share(build_checkpoint("qwen3_vl"), 1, 2)
    plain = [name for name, part in side.module.named_modules() if type(part) is nn.Linear]
    packed = [part for part in side.module.modules() if isinstance(part, PrepackedLinear)]
    assert plain == []
    # Of each layer: q, k and v in one, what follows attention, gate and up in one, down.
    assert len(packed) == 3 * 4 + 1
    assert {part.out_features for part in packed} == {32 + 16 + 16, 64, 2 * 64, 384}


@pytest.mark.parametrize("heads", [2, 8])
def test_a_tensor_of_another_size_than_the_config_says_is_refused_though_a_part_would_fit(heads, tmp_path):
    path = edit_text_config(
        build_checkpoint("llava", tmp_path / "model"), num_attention_heads=heads, head_dim=16
    )
    with pytest.raises(ConfigError, match=r"has misshapen tensors: .*_proj"):
        share(path, 0, 2)


def test_heads_that_cannot_be_divided_are_refused_before_anything_is_read(monkeypatch):
    path = build_checkpoint("t5")
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(ConfigError, match=r"5 attention heads .* among 2 ranks: .* one of 1, 5"):
        share(path, 0, 2)


def test_a_layer_that_is_no_linear_layer_cannot_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    from triptych.models.families.bart import BartTextDecoder
    from triptych.models.parallel.plan import Style

    rules = ((r".+\.embed_tokens", Style.COLUMN), *BartTextDecoder.shard_rules)
    monkeypatch.setattr(BartTextDecoder, "shard_rules", rules)
    with pytest.raises(
        ConfigError, match=r"embed_tokens is a .*Embedding, which cannot be divided by column"
    ):
        share(build_checkpoint("bart"), 0, 2)
