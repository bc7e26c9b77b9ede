"""The full matrix of families, budgets, block sizes and chunk boundaries; `make test-slow` runs it."""

from __future__ import annotations

import pytest

from support.data.oracle import assert_exact
from support.engine.engine_cell import Checkpoint, Prompt, engine_cell, reference

pytestmark = pytest.mark.slow

CAT, DOG, TREE = (1, 96, 64), (2, 64, 96), (3, 64, 64)
PROMPTS = [
    Prompt("Say something about the weather, and then about the sea."),
    Prompt("What is this?", (CAT,)),
    Prompt("Compare these three.", (CAT, DOG, TREE)),
    Prompt("Two of them.", (DOG, DOG)),
    Prompt("Describe the dog.", (DOG,)),
    Prompt("Name five rivers."),
]
FAMILIES = ["qwen3_vl", "qwen2_5_vl", "llava"]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return Checkpoint.open(request.param)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize("budget", [7, 16, 33, 512, 4096])
def test_64_tokens_of_mixed_prompts_match(
    checkpoint: Checkpoint, budget: int, block_size: int, prefix_caching: bool
) -> None:
    flags = {"max_num_batched_tokens": budget, "block_size": block_size, "prefix_caching": prefix_caching}
    results = [reference(checkpoint.path, prompt, 64) for prompt in PROMPTS]
    with engine_cell(checkpoint, **flags) as cell:
        for _ in range(2):
            assert_exact(results, cell.answer(PROMPTS, 64), min_distinct=15)
        cell.assert_at_rest()


@pytest.mark.timeout(300)
def test_a_chunk_boundary_at_every_offset_of_three_images_changes_nothing(checkpoint: Checkpoint) -> None:
    prompt = PROMPTS[2]
    result = reference(checkpoint.path, prompt, 24)
    end = checkpoint.features(result.prompt_token_ids, prompt)[-1].placement.end
    for budget in range(1, end + 1, 1 if end < 120 else 3):
        with engine_cell(checkpoint, max_num_batched_tokens=budget, prefix_caching=False) as cell:
            assert cell.answer([prompt], 24) == [result.token_ids]
