"""Errors keep their meaning over a process border."""

from __future__ import annotations

import pytest

from triptych.base import errors

REQUEST_ERRORS = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.RequestError) and cls is not errors.RequestError
]


@pytest.mark.parametrize("cls", REQUEST_ERRORS)
def test_an_error_comes_back_from_its_code_as_itself(cls):
    back = errors.error_from_code(cls.code, "why", param="field", retry_after=1.0)
    assert type(back) is cls
    assert (back.message, back.param, back.retry_after) == ("why", "field", 1.0)


def test_an_unknown_code_is_our_fault():
    assert type(errors.error_from_code("new", "why")) is errors.InternalError


def test_codes_and_statuses_name_one_error_each():
    assert len({cls.code for cls in REQUEST_ERRORS}) == len(REQUEST_ERRORS)
    assert all(400 <= cls.status < 600 for cls in REQUEST_ERRORS)
