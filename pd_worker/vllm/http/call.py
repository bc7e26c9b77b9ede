"""One call of vLLM: token ids and where items stand in them, never media."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.base.types import ItemPlan, JsonObject, MMFeature


@dataclass(frozen=True, slots=True)
class EngineCall:
    """What vLLM is asked for. `sampling_params` are vLLM's, as JSON.

    Calls with different salts share no blocks of vLLM's prefix cache.
    """

    token_ids: list[int]
    sampling_params: JsonObject
    cache_salt: str = ""
    features: Sequence[MMFeature] = ()

    @property
    def by_modality(self) -> dict[str, list[MMFeature]]:
        """The items in their order, by modality."""
        found: dict[str, list[MMFeature]] = {}
        for feature in self.features:
            found.setdefault(feature.plan.modality, []).append(feature)
        return found

    @property
    def ec_transfer_params(self) -> JsonObject:
        """What vLLM's EC connector is given of each item."""
        return {feature.mm_hash: {"namespace": feature.plan.namespace} for feature in self.features}


def size_of(plan: ItemPlan) -> tuple[str, tuple[int, ...]]:
    """The field that stands for an item without media: its grid, which decides positions, else its rows.

    vLLM 0.32 ends its engine on an item without fields. The connector knows that neither is media.
    """
    return ("image_grid_thw", tuple(plan.grid_thw)) if plan.grid_thw else ("rows", (plan.rows,))


def probe_call() -> EngineCall:
    """A call that takes one step of the engine."""
    return EngineCall([0], {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "ignore_eos": True})
