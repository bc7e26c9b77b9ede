"""Misspelt fields are found, and fields of other servers never are."""

from __future__ import annotations

import pytest

from triptych.base.errors import InvalidRequest
from triptych.proxy.http.endpoint import PostEndpoint
from triptych.proxy.http.field_names import DOCUMENTED, ignored_header, is_misspelt
from triptych.proxy.openai.app import make_app  # noqa: F401 - defines every endpoint

KNOWN = ("max_tokens", "n", "seed", "stop", "temperature", "top_p")


def bodies() -> list[tuple[str, tuple[str, ...]]]:
    kinds = [PostEndpoint, *PostEndpoint.__subclasses__()]
    for kind in kinds:
        kinds += [it for it in kind.__subclasses__() if it not in kinds]
    return [(it.__name__, it.body.__struct_fields__) for it in kinds if hasattr(it, "body")]


@pytest.mark.parametrize(
    "name", ["max_token", "temprature", "maxTokens", "topP", "sede", "seeds", "max_tonkes"]
)
def test_a_name_near_to_a_known_one_is_misspelt(name: str) -> None:
    assert is_misspelt(name, KNOWN)


@pytest.mark.parametrize("name", ["x", "mx", "speed", "max_to", "a_seed_of", "m" * 65, "max_things"])
def test_a_name_further_away_is_another_field(name: str) -> None:
    assert not is_misspelt(name, KNOWN)


def test_every_endpoint_names_its_fields_and_takes_none_of_another_server_for_a_misspelt_one() -> None:
    found = bodies()
    assert len(found) >= 9
    for _, known in found:
        assert not [name for name in DOCUMENTED - set(known) if is_misspelt(name, known)]


def test_every_long_field_of_every_endpoint_is_known_without_its_last_letter() -> None:
    for endpoint, known in bodies():
        for name in known:
            if len(name) > 4 and name[:-1] not in DOCUMENTED and name[:-1] not in known:
                assert is_misspelt(name[:-1], known), (endpoint, name)


def test_a_misspelt_name_behind_many_unknown_ones_costs_bounded_work_and_passes() -> None:
    many = [f"field_{index}_of_another" for index in range(5000)]
    for before in (16, 5000):
        assert ignored_header([*many[:before], "temprature"], KNOWN, reject=False)
    with pytest.raises(InvalidRequest, match="did you mean temperature"):
        ignored_header([*many[:15], "temprature"], KNOWN, reject=False)
