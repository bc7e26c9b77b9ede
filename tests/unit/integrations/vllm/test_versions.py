"""The versions of vLLM that the connector starts with."""

from __future__ import annotations

import pytest

from triptych.base.errors import ConfigError
from triptych.integrations import vllm
from triptych.integrations.vllm import versions


@pytest.mark.parametrize("found", ["0.32.0", "0.33.0", "0.33.1+cu130", "0.32.2rc1", "0.33"])
def test_a_supported_version_is_accepted(found):
    versions.check_version(found)


@pytest.mark.parametrize("found", ["0.31.0", "0.34.0", "0.3.3", "0.320.0", "1.0.0", "dev", ""])
def test_another_version_is_one_error_that_names_it_and_the_remedy(found):
    with pytest.raises(ConfigError) as raised:
        versions.check_version(found)
    assert f"this is vLLM {found}:" in str(raised.value)
    assert "install vllm==0.33.*" in str(raised.value)


def test_the_connector_is_refused_before_another_vllm_is_imported(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda package: "0.40.0")
    with pytest.raises(ConfigError, match=r"this is vLLM 0\.40\.0"):
        vllm.__getattr__("TriptychECConnector")
