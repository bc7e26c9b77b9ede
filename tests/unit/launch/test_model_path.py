"""The model that a command means."""

from __future__ import annotations

from support.options import assert_refused, triptych
from triptych.apps.launch.model_path import (
    AUDIO_DEMO_MODEL,
    DEMO_MODEL,
    model_name,
    resolve_demo,
    resolve_model,
)


def test_without_a_model_the_demo_model_is_served_by_its_name():
    assert resolve_model("") == DEMO_MODEL
    assert model_name(DEMO_MODEL) == "demo"


def test_the_audio_demo_is_served_by_its_name_and_not_beside_a_model():
    assert resolve_model(resolve_demo("audio", "")) == AUDIO_DEMO_MODEL
    assert model_name(AUDIO_DEMO_MODEL) == "demo-audio"
    assert resolve_model(resolve_demo("images", "")) == DEMO_MODEL
    assert_refused(triptych("serve", "/folder", "--demo", "audio"), "--demo audio", "MODEL=/folder", "leave")
