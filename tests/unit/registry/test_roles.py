from __future__ import annotations

import pytest

from triptych.base.types import WorkerInfo
from triptych.registry.matching import ROLE, ROLES, role_of


@pytest.mark.parametrize(("capacity", "role"), [({ROLE: place}, role) for place, role in enumerate(ROLES)])
def test_a_registration_names_the_role(capacity: dict[str, int], role: str) -> None:
    assert role_of(WorkerInfo("a:1", "pd", "i", "k", "m", (), capacity)) == role


@pytest.mark.parametrize("capacity", [{}, {ROLE: 3}, {ROLE: -1}])
def test_a_worker_of_another_release_has_both_roles(capacity: dict[str, int]) -> None:
    assert role_of(WorkerInfo("a:1", "pd", "i", "k", "m", (), capacity)) == "both"
