"""Which connections NetworkPolicies allow, decided as Kubernetes' documentation says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

from support.kubernetes.chart import Manifest

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Peer:
    """One end of a connection: a pod with labels and named ports, or with `address` a host outside."""

    labels: Labels = field(default_factory=dict)
    namespace: str = "default"
    ports: Mapping[str, int] = field(default_factory=dict)
    address: str = ""


def allowed(
    policies: Sequence[Manifest], source: Peer, target: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Whether `source` may connect to `port` of `target`: both ends' policies must let it."""
    return _lets(policies, "Egress", source, target, port, target, protocol) and _lets(
        policies, "Ingress", target, source, port, target, protocol
    )


def _lets(
    policies: Sequence[Manifest],
    direction: str,
    pod: Peer,
    other: Peer,
    port: int,
    server: Peer,
    protocol: str,
) -> bool:
    """Whether the policies of `pod` let it be connected with `other`; without any, everything is let."""
    own = [one for one in _of(policies, pod) if direction in one["spec"]["policyTypes"]]
    if pod.address or not own:
        return True
    side = "to" if direction == "Egress" else "from"
    rules = [rule for one in own for rule in one["spec"].get(direction.lower(), [])]
    return any(
        _at_port(rule.get("ports"), port, server, protocol)
        and (not rule.get(side) or any(_is(peer, other, pod.namespace) for peer in rule[side]))
        for rule in rules
    )


def _of(policies: Sequence[Manifest], pod: Peer) -> Iterator[Manifest]:
    """The policies that select the pod."""
    for one in policies:
        if one["metadata"]["namespace"] == pod.namespace and selects(one["spec"]["podSelector"], pod.labels):
            yield one


def _at_port(ports: Sequence[Mapping[str, Any]] | None, port: int, server: Peer, protocol: str) -> bool:
    if ports is None:
        return True
    return any(
        one.get("protocol", "TCP") == protocol and server.ports.get(str(one["port"]), one["port"]) == port
        for one in ports
    )


def _is(peer: Mapping[str, Any], other: Peer, namespace: str) -> bool:
    if block := peer.get("ipBlock"):
        if not other.address:
            return False
        address = ip_address(other.address)
        inside = [ip_network(one) for one in block.get("except", [])]
        return address in ip_network(block["cidr"]) and not any(address in one for one in inside)
    if other.address:
        return False
    spaces = peer.get("namespaceSelector")
    names = {"kubernetes.io/metadata.name": other.namespace}
    same = selects(spaces, names) if spaces is not None else other.namespace == namespace
    return same and ("podSelector" not in peer or selects(peer["podSelector"], other.labels))


def selects(selector: Mapping[str, Any], labels: Labels) -> bool:
    """Whether a label selector with `matchLabels` selects these labels."""
    if unknown := set(selector) - {"matchLabels"}:
        raise ValueError(f"selectors with {sorted(unknown)} are not read here")
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
