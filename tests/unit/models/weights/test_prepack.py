"""Linear layers with weights laid out for oneDNN, also with a GELU in one operator."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from support.data.checkpoints import build_checkpoint
from triptych.kernels.library import kernel_library
from triptych.models.registry import load_decoder, load_encoder
from triptych.models.weights import prepack as module
from triptych.models.weights.loading import parameter_bytes
from triptych.models.weights.prepack import (
    FEW_ROWS,
    ROWS,
    PrepackedLinear,
    TiedLinear,
    can_prepack,
    fuse_gelu,
    prepack,
)
from triptych.pd_worker.attention.attention import ATTENTION_NAME

CPU = torch.device("cpu")
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DTYPES = [pytest.param(dtype, id=str(dtype)) for dtype in ERRORS if can_prepack(CPU, dtype)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (0, 48), (1, 48), (7, 48), (2, 3, 48), (300, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_that_of_the_plain_weight(dtype, shape, bias):
    torch.manual_seed(0)
    linear = nn.Linear(48, 33, bias=bias, dtype=dtype)
    x = torch.randn(shape).to(dtype)
    with torch.inference_mode():
        wanted, found = linear(x), PrepackedLinear(linear)(x)
    assert found.shape == wanted.shape and found.dtype == dtype
    torch.testing.assert_close(found, wanted, atol=ERRORS[dtype], rtol=ERRORS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_do_not_lie_together_are_multiplied_all_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 33, dtype=dtype)
    across, every_other = torch.randn(48, 5).to(dtype).T, torch.randn(10, 96).to(dtype)[::2, :48]
    with torch.inference_mode():
        for x in (across, every_other):
            torch.testing.assert_close(
                PrepackedLinear(linear)(x), linear(x), atol=ERRORS[dtype], rtol=ERRORS[dtype]
            )


class Tied(nn.Module):
    def __init__(self, words: int = 768, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(words, 768, dtype=dtype),
            nn.Linear(768, words, False, dtype=dtype),
        )
        self.head.weight = self.embed.weight
        self.first = nn.Linear(768, 768, dtype=dtype)
        self.second = nn.ModuleList([self.first])
        self.requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_two_modules_hold_stays_one_and_a_tied_head_has_no_second_weight(dtype) -> None:
    model = Tied(dtype=dtype)
    before = parameter_bytes(model)
    prepack(model)
    assert model.head.weight is model.embed.weight and model.embed.weight.layout is torch.strided
    assert isinstance(model.first, PrepackedLinear) and model.second[0] is model.first
    assert parameter_bytes(model) == before


has_kernels = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels")


@has_kernels
@pytest.mark.parametrize("rows", [0, 1, 7, 16, 32, 33])
@pytest.mark.parametrize("chosen", [ROWS, (), (4, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_head_gives_the_product_by_our_kernel_and_the_embedding_its_rows(
    dtype, rows, chosen, monkeypatch
):
    torch.manual_seed(0)
    model, x, calls = Tied(dtype=dtype), torch.randn(rows, 768).to(dtype), list[int]()
    ids = torch.arange(768)
    inner = module.multiply
    monkeypatch.setattr(module, "multiply", lambda *args, **named: calls.append(1) or inner(*args, **named))
    with torch.inference_mode():
        wanted, embedded = model.head(x), model.embed(ids)
        prepack(model)
        assert isinstance(model.head, TiedLinear) and model.head.block == 1
        model.head.choose(chosen)
        torch.testing.assert_close(model.head(x), wanted, atol=ERRORS[dtype], rtol=ERRORS[dtype])
        assert torch.equal(model.embed(ids), embedded)
    above = min((count for count in ROWS if count >= rows), default=0) if rows else 0
    assert len(calls) == (above in chosen and above in FEW_ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_head_of_a_number_of_words_that_our_kernel_does_not_take_stays_plain(dtype) -> None:
    model = Tied(770, dtype)
    prepack(model)
    assert type(model.head) is nn.Linear and model.head.weight is model.embed.weight


@has_kernels
@pytest.mark.skipif(not can_prepack(CPU, torch.bfloat16), reason="no bfloat16")
def test_a_tied_weight_of_many_rows_stays_plain_and_one_that_is_not_contiguous_too() -> None:
    many, across = Tied(dtype=torch.bfloat16), Tied(dtype=torch.bfloat16)
    across.head.weight = across.embed.weight = nn.Parameter(across.embed.weight.T, requires_grad=False)
    prepack(many, many_rows=True)
    prepack(across)
    assert type(many.head) is type(across.head) is nn.Linear


@pytest.mark.parametrize(
    ("side", "dtype", "many_rows", "packed"),
    [
        (725, torch.float32, False, True),
        (512, torch.float32, False, False),
        (256, torch.float32, True, True),
        (256, torch.bfloat16, False, True),
        (128, torch.bfloat16, True, False),
        (128, torch.float32, True, False),
    ],
)
def test_small_weights_stay_plain(side: int, dtype: torch.dtype, many_rows: bool, packed: bool) -> None:
    model = nn.Sequential(nn.Linear(side, side, dtype=dtype))
    prepack(model, many_rows=many_rows)
    assert isinstance(model[0], PrepackedLinear) == (packed and can_prepack(CPU, dtype))


def test_each_plain_weight_is_let_go_before_the_next_one_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(768, 768) for _ in range(8)))
    plain = [weakref.ref(layer.weight) for layer in model]
    alive = []

    class Counting(PrepackedLinear):
        def __init__(self, original: nn.Linear) -> None:
            alive.append(sum(weight() is not None for weight in plain))
            super().__init__(original)

    monkeypatch.setattr("triptych.models.weights.prepack.PrepackedLinear", Counting)
    prepack(model)
    # The one that was copied last may still be at hand.
    assert all(count <= 9 - number for number, count in enumerate(alive))


def test_the_weight_can_be_had_back() -> None:
    linear = nn.Linear(48, 33)
    assert torch.equal(PrepackedLinear(linear).weight.to_dense(), linear.weight)


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.float16}, {"dtype": torch.float64}, {"device": "meta"}],
    ids=["float16", "float64", "not on a CPU"],
)
def test_what_onednn_does_not_multiply_stays_plain(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(768, 768, **options))
    prepack(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("family", ["qwen3_vl", "whisper"])
def test_both_sides_are_served_with_prepacked_layers(family: str, prepack_all: None) -> None:
    path = build_checkpoint(family)
    sides = (
        load_encoder(path, device=CPU, dtype=torch.float32),
        load_decoder(path, device=CPU, dtype=torch.float32, attn_implementation=ATTENTION_NAME),
    )
    for side in sides:
        plain = {name for name, part in side.module.named_modules() if type(part) is nn.Linear}
        assert plain <= {"lm_head", "proj_out"}
        assert any(isinstance(part, PrepackedLinear) for part in side.module.modules())


class Part(nn.Module):
    def __init__(self, activation: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fc1 = nn.Linear(256, 512, dtype=dtype)
        self.activation_fn = activation
        self.fc2 = nn.Linear(512, 256, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.activation_fn(self.fc1(x)))
        return out


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "activation",
    [nn.GELU, lambda: nn.GELU("tanh"), lambda: ACT2FN["gelu_pytorch_tanh"], lambda: ACT2FN["gelu"]],
)
def test_the_outputs_are_those_of_both_parts_and_no_name_changes(activation, dtype, rows):
    torch.manual_seed(0)
    part, x = Part(activation(), dtype), torch.randn(rows, 256).to(dtype)
    names = set(part.state_dict())
    with torch.inference_mode():
        wanted = part(x)
        prepack(part, many_rows=True)
        fuse_gelu(part)
        found = part(x)
    assert isinstance(part.activation_fn, nn.Identity) and set(part.state_dict()) == names
    torch.testing.assert_close(found, wanted, atol=ERRORS[dtype], rtol=ERRORS[dtype])


@pytest.mark.parametrize("approximate", ["none", "tanh"] if can_prepack(CPU, torch.float32) else [])
def test_both_ways_to_approximate_stay_apart(approximate: str) -> None:
    """They differ by up to 5e-4, more than what a product's rounding gives."""
    torch.manual_seed(0)
    linear, x = nn.Linear(256, 256), torch.randn(64, 256) * 3
    packed = PrepackedLinear(linear)
    packed.fuse_gelu(approximate)
    wanted = nn.functional.gelu(linear(x), approximate=approximate)
    torch.testing.assert_close(packed(x), wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["quick_gelu", "silu", "gelu_python", "gelu_python_tanh", "gelu_new"])
def test_other_activations_stay_as_they_are(name: str) -> None:
    part = Part(ACT2FN[name])
    prepack(part, many_rows=True)
    fuse_gelu(part)
    assert type(part.activation_fn) is type(ACT2FN[name])


class Adds(Part):
    """Adds the outputs to what the activation makes of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.fc1(x)
        return self.activation_fn(inner) + inner


class Later(Part):
    """Norms the outputs before the activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        x = x / x.norm()
        return self.activation_fn(x)


class InTurn(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        x = self.activation_fn(x)
        return x


@pytest.mark.parametrize(("kind", "follows"), [(Part, True), (InTurn, True), (Adds, False), (Later, False)])
def test_an_activation_is_a_part_of_the_layer_only_where_nothing_else_takes_its_outputs(kind, follows):
    torch.manual_seed(0)
    part, x = kind(nn.GELU()), torch.randn(3, 256)
    wanted = part(x)
    prepack(part, many_rows=True)
    fuse_gelu(part)
    assert isinstance(part.activation_fn, nn.Identity) == follows
    torch.testing.assert_close(part(x), wanted, atol=1e-4, rtol=1e-4)


def test_a_layer_that_is_not_prepacked_keeps_its_activation() -> None:
    part = Part(nn.GELU())
    fuse_gelu(part)
    assert type(part.activation_fn) is nn.GELU


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_weight_is_brought_into_huge_pages_whoever_multiplies_it(dtype, monkeypatch):
    brought: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "triptych.models.weights.prepack.use_huge_pages", lambda *memory: brought.append(memory)
    )
    # 80 outputs are in no blocks that our kernel reads.
    layers = [PrepackedLinear(nn.Linear(64, outs).to(dtype)) for outs in (64, 80)]
    expected = [torch.ops.mkldnn.data_ptr(layer.weight) for layer in layers]
    assert [address for address, _ in brought] == expected
    assert all(
        count >= layer.in_features * layer.out_features * dtype.itemsize
        for (_, count), layer in zip(brought, layers, strict=True)
    )
