"""Validation and conversion of protobuf messages."""

from __future__ import annotations

import re
from collections.abc import Sized

from triptych.base.errors import InvalidRequest
from triptych.base.hashing import MM_HASH
from triptych.base.request.chat import TemplateOptions
from triptych.base.types import ItemPlan
from triptych.protos import common_pb2, pd_pb2
from triptych.protos.convert import plan_from_proto

#: Keys of one notice.
MAX_KEYS = 16384
#: Requests named in one call.
MAX_REQUESTS = 65536
# No slash: ids of attempts in caches are joined with slashes. No space and no control character:
# names go into logs.
_NAME = re.compile(r"[!-.0-~]{1,256}")


def checked_plan(message: common_pb2.ItemPlan) -> ItemPlan:
    """An item's plan; InvalidRequest when it is inconsistent."""
    plan = plan_from_proto(message)
    if not MM_HASH.fullmatch(plan.namespace):
        raise InvalidRequest("an item's namespace must be 64 lower-case hex characters", param="items")
    if not (plan.rows and plan.width):
        raise InvalidRequest("an item needs rows and width above 0", param="items")
    if plan.length == 0 and plan.runs is None:
        return plan  # A cross item: it has no placeholder.
    if _embeds(plan) != plan.rows:
        raise InvalidRequest(
            f"an item's runs take {_embeds(plan)} embeddings, but it has {plan.rows} rows", param="items"
        )
    return plan


def _embeds(plan: ItemPlan) -> int:
    """Embeddings that the placeholder takes; -1 when its runs are out of order or out of the span."""
    if plan.runs is None:
        return plan.length
    end, total = 0, 0
    for start, count in plan.runs:
        if start < end or count < 1 or start + count > plan.length:
            return -1
        end, total = start + count, total + count
    return total


def in_state(message: pd_pb2.SubmitRequest, state: pd_pb2.ItemState) -> frozenset[str]:
    """The keys of the request's items in this state."""
    return frozenset(slot.plan.mm_hash for slot in message.items if slot.state == state)


def template_from_proto(message: pd_pb2.TemplateOptions) -> TemplateOptions:
    return TemplateOptions(
        tools=message.tools,
        variables=message.variables,
        generation_prompt=not message.no_generation_prompt,
        continue_final_message=message.continue_final_message,
    )


def check_name(field: str, value: str) -> None:
    """InvalidRequest unless `value` can name a proxy or a request."""
    if not _NAME.fullmatch(value):
        raise InvalidRequest(
            f"{field} must have 1 to 256 printable ASCII characters, no space and no slash", param=field
        )


def check_label(value: str) -> None:
    """InvalidRequest for a label that must not be logged; it may be empty."""
    if value and not _NAME.fullmatch(value):
        raise InvalidRequest(
            "label must have at most 256 printable ASCII characters, no space and no slash", param="label"
        )


def check_count(field: str, values: Sized, limit: int) -> None:
    """InvalidRequest when one call names more than `limit`."""
    if len(values) > limit:
        raise InvalidRequest(
            f"{field} holds {len(values)} entries; one call takes at most {limit}", param=field
        )
