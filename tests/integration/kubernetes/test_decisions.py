"""The decisions of the small Kubernetes, and what it makes of a container's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.kubernetes.pod_spec import PodContext, SpecError, expand, on_machine, resolve, with_hosts
from support.kubernetes.rollout import (
    PodChanges,
    PodView,
    deployment_changes,
    evictions_allowed,
    share,
    stateful_changes,
)

SECRET = {"stringData": {"url": "redis://store:6379/0"}}


def _context(folder: Path, **changes: Any) -> PodContext:
    objects = {("Secret", "store"): SECRET}
    given = {
        "name": "web-1",
        "namespace": "default",
        "ip": "127.9.9.9",
        "node": "node-0",
        "labels": {},
        "folder": folder,
        "lookup": lambda kind, name: objects.get((kind, name)),
        "hosts": {"store": "127.9.9.2"},
    }
    return PodContext(**(given | changes))


def test_a_containers_words_are_resolved(tmp_path: Path) -> None:
    container = {
        "name": "main",
        "command": ["triptych"],
        "args": [
            "pd",
            "--host",
            "0.0.0.0",
            "--advertise",
            "$(POD_IP):50051",
            "--spool-folder",
            "/spool",
            "$$(POD_IP)",
        ],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "TRIPTYCH_STORE", "valueFrom": {"secretKeyRef": {"name": "store", "key": "url"}}},
            {"name": "WHERE", "value": "$(POD_IP)/$(UNKNOWN)"},
            {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}},
            {
                "name": "LIMIT",
                "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1"}},
            },
        ],
        "resources": {"requests": {"cpu": "2500m"}},
    }
    command = resolve(container, _context(tmp_path), {"/spool": Path("/pods/spool")})
    assert command.words == (
        *("triptych", "pd", "--host", "127.9.9.9", "--advertise", "127.9.9.9:50051"),
        *("--spool-folder", "/pods/spool", "$(POD_IP)"),
    )
    assert command.environment == {
        "POD_IP": "127.9.9.9",
        "TRIPTYCH_STORE": "redis://127.9.9.2:6379/0",
        "WHERE": "127.9.9.9/$(UNKNOWN)",
        "CPUS": "3",
        "LIMIT": "0",
    }


@pytest.mark.parametrize(
    "source",
    [
        {"secretKeyRef": {"name": "store", "key": "none"}},
        {"secretKeyRef": {"name": "none", "key": "url"}},
        {"fieldRef": {"fieldPath": "status.phase"}},
    ],
)
def test_a_reference_to_nothing_is_refused(tmp_path: Path, source: dict[str, Any]) -> None:
    container = {"name": "main", "command": ["x"], "env": [{"name": "A", "valueFrom": source}]}
    with pytest.raises(SpecError):
        resolve(container, _context(tmp_path), {})


def test_names_and_paths_are_replaced_only_as_a_whole() -> None:
    hosts = {"store": "127.1.1.1", "store.default.svc": "127.1.1.1", "proxy": "127.1.1.2"}
    assert with_hosts("redis://u@store.default.svc:6379/0", hosts) == "redis://u@127.1.1.1:6379/0"
    assert with_hosts("store-1:1,store:2,proxy", hosts) == "store-1:1,127.1.1.1:2,127.1.1.2"
    mounts = {"/tmp": Path("/tmp/pods/tmp"), "/etc/keys": Path("/pods/keys"), "/dev/shm": Path("/pods/shm")}
    assert on_machine("/tmp/cache", mounts) == "/tmp/pods/tmp/cache"
    assert on_machine("/etc/keys", mounts) == "/pods/keys"
    assert on_machine("/etc/keys2 /tmpfs /dev/shm/x", mounts) == "/etc/keys2 /tmpfs /dev/shm/x"
    assert expand("$(A)$$(A)$(B)", {"A": "1"}) == "1$(A)$(B)"


def _pods(*kinds: str) -> list[PodView]:
    """ "new" and "old" are ready, "NEW" and "OLD" are not."""
    return [
        PodView(f"{kind}-{age}", kind.lower() == "new", kind.islower(), age) for age, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("pods", "desired", "surge", "unavailable", "changes"),
    [
        ((), 2, 1, 0, PodChanges(2)),
        (("old", "old"), 2, 1, 0, PodChanges(1)),
        (("old", "old", "NEW"), 2, 1, 0, PodChanges()),
        (("old", "old", "new"), 2, 1, 0, PodChanges(0, ("old-0",))),
        (("old", "new"), 2, 1, 0, PodChanges(1)),
        (("new", "new", "old"), 2, 1, 0, PodChanges(0, ("old-2",))),
        (("old", "old"), 2, 0, 1, PodChanges(0, ("old-0",))),
        (("old",), 2, 0, 1, PodChanges(1)),
        (("old", "NEW"), 2, 0, 1, PodChanges()),
        (("OLD", "old"), 2, 0, 1, PodChanges(0, ("OLD-0",))),
        (("new", "new", "NEW"), 1, 1, 0, PodChanges(0, ("NEW-2", "new-1"))),
        (("old", "new"), 0, "25%", "25%", PodChanges(0, ("new-1",))),
    ],
)
def test_rolling_updates_take_kubernetes_steps(
    pods: tuple[str, ...], desired: int, surge: int | str, unavailable: int | str, changes: PodChanges
) -> None:
    assert deployment_changes(_pods(*pods), desired, surge, unavailable) == changes


def test_stateful_pods_are_replaced_one_by_one() -> None:
    names = ["s-0", "s-1"]

    def pod(name: str, current: bool, ready: bool) -> PodView:
        return PodView(name, current, ready, 0)

    assert stateful_changes([], names) == PodChanges(2)
    assert stateful_changes([pod("s-0", False, True), pod("s-1", False, True)], names) == PodChanges(
        0, ("s-1",)
    )
    assert stateful_changes([pod("s-0", False, True), pod("s-1", True, False)], names) == PodChanges()
    assert stateful_changes([pod("s-0", False, True), pod("s-1", True, True)], names) == PodChanges(
        0, ("s-0",)
    )
    assert stateful_changes([pod("s-0", True, True), pod("s-1", True, True)], ["s-0"]) == PodChanges(
        0, ("s-1",)
    )


def test_budgets_count_as_kubernetes_does() -> None:
    assert evictions_allowed(4, 4, most_gone=1) == 1
    assert evictions_allowed(4, 3, most_gone=1) == 0
    assert evictions_allowed(3, 3, most_gone="50%") == 2
    assert evictions_allowed(3, 3, least=2) == 1
    assert (share("25%", 3, up=True), share("25%", 3, up=False), share(2, 3, up=True)) == (1, 0, 2)
