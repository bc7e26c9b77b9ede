"""Encoder graphs, decode graphs, two tower ranks and two PD ranks at once: the tokens of generate.

The graphs are static buffers with plain calls, and the ranks meet by gloo: all of it runs on a CPU. Mutants,
put into the running workers, show that the comparison would not overlook what goes wrong in between.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chaos.faults import patched
from support.chaos.rest import assert_at_rest
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.pictures import picture
from support.data.traffic import Case
from support.engine_faults.mutants import VARIABLE
from support.processes.cluster import Cluster, running_cluster
from support.processes.families import (
    FAMILIES,
    PICTURES,
    FamilyCase,
    assert_family_exact,
    encoded_cases,
    family_answers,
    family_references,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


#: The families whose answers each of them changes, as `engine_faults/mutants.py` knows them. What an
#: encoder-decoder model attends to is one item without positions: neither the order of items nor that of rows
#: is anything to it.
MUTANTS = {
    "swapped_items": PICTURES,
    "zeroed_deepstack": ("qwen3_vl",),
    "positions_in_one_dimension": ("qwen3_vl", "qwen2_5_vl"),
    "rows_shifted_by_one": PICTURES,
    "rows_of_the_item_before": FAMILIES,
}


def environment(folder: Path) -> dict[str, str]:
    """What a cluster gets in whose workers mutants may be put, by a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return {**patched(), VARIABLE: str(folder / "mutant")}


@contextlib.contextmanager
def mutant(folder: Path, name: str, path: Path) -> Iterator[None]:
    """Requests that begin now meet this mutant; `path` is the checkpoint that is served."""
    config = json.loads((path / "config.json").read_text())
    width = config.get("text_config", config).get("hidden_size", 0)
    scratch, file = folder / "mutant.new", folder / "mutant"
    scratch.write_text(f"{name} {width}")
    scratch.replace(file)
    try:
        yield
    finally:
        file.unlink()


EVERYTHING = (
    *("--threads", "1", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
    *("--encoder-graphs", "static", "--decode-graphs", "static"),
    *("--encoder-data-parallel", "2", "--tensor-parallel", "2"),
)
#: T5's usual tiny checkpoint has an odd number of heads.
VARIANTS = {"t5": "even"}


#: Output tokens of a request that meets a mutant.
TOKENS = 64


@contextlib.contextmanager
def everything(
    family: str, path: Path, run_dir: Path, environment: dict[str, str] | None = None
) -> Iterator[Cluster]:
    """A cluster with all of them for the length of a `with`, at rest at its end."""
    words = ("--served-model-name", family, *EVERYTHING)
    with running_cluster(path, run_dir, *words, environment=environment) as cluster:
        yield cluster
        assert cluster.total("pd", "triptych_pd_ranks") == 2
        assert cluster.total("encoder", "triptych_encoder_ranks") == 2
        assert cluster.total("pd", "triptych_pd_graph_steps_total") > 0
        assert cluster.total("encoder", "triptych_encoder_graph_misses_total") == 0
        assert_at_rest(cluster)


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_is_exact_with_all_of_them(family: str, tmp_path: Path) -> None:
    path = build_checkpoint(family, variant=VARIANTS.get(family, ""))
    with everything(family, path, tmp_path) as cluster:
        await assert_family_exact(cluster, family, path)


@pytest.mark.parametrize("family", FAMILIES)
async def test_no_mutant_is_overlooked_with_all_of_them(family: str, tmp_path: Path) -> None:
    path = build_checkpoint(family, variant=VARIANTS.get(family, ""))
    folder = tmp_path / "mutants"
    mutants = [name for name, families in MUTANTS.items() if family in families]
    with everything(family, path, tmp_path, environment(folder)) as cluster:
        await _assert_exact(cluster, family, path, _cases(family, 0))
        for number, name in enumerate(mutants, start=1):
            cases = _cases(family, number)
            spoilt, whole = ([case for case in cases if _meets(name, case) is met] for met in (True, False))
            with mutant(folder, name, path):
                with pytest.raises(AssertionError, match="output . differs at token"):
                    await _assert_exact(cluster, family, path, spoilt)
                await _assert_exact(cluster, family, path, whole)
        # What differed was the mutants' work: without them the same workers are exact again.
        await _assert_exact(cluster, family, path, _cases(family, len(MUTANTS) + 1))


def _cases(family: str, round_number: int) -> list[FamilyCase]:
    """A text, one picture and two of one size, or two encoder inputs; different ones in every round."""
    seed = 10 * round_number
    if family in PICTURES:
        one, two, three = (picture(seed + index, 96, 64) for index in range(3))
        return [
            Case((f"Say something about number {round_number}.",)),
            Case((0, f"What is this, number {round_number}?"), (one,)),
            Case((0, "Compare this", 1, f"with that, number {round_number}."), (two, three)),
        ]
    texts = [f"The rain in Spain, day {seed}", f"A red circle beside {seed} blue squares, and nothing else"]
    sources = {
        "whisper": [(1.0 + index, 1 + seed + index) for index in range(2)],
        "trocr": [picture(seed + index, 70 + 9 * index, 40) for index in range(2)],
    }
    return list(encoded_cases(family, sources.get(family, texts)))


def _meets(name: str, case: FamilyCase) -> bool:
    """Whether the case has what the mutant spoils."""
    if isinstance(case, Case):
        return len(case.images) >= (2 if name == "swapped_items" else 1)
    return True


async def _assert_exact(cluster: Cluster, family: str, path: Path, cases: list[FamilyCase]) -> None:
    if not cases:
        return
    answers = await family_answers(cluster, family, cases, TOKENS)
    assert_exact(family_references(family, path, cases, TOKENS), answers, min_distinct=1)
