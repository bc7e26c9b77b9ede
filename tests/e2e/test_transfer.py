"""The demo by each value of `--ec-transfer`: one answer, and the path that the request's record names."""

from __future__ import annotations

import json
import urllib.request

import pytest

from support.processes.cluster import start_cluster
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.demo import examples

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    "transfer, note", [("store", ""), pytest.param("auto", "by shared memory", marks=pytest.mark.slow)]
)
def test_a_new_picture_takes_the_path_that_is_asked_for(tmp_path, transfer, note):
    cluster = start_cluster(DEMO_MODEL, tmp_path, "--ec-transfer", transfer)
    try:
        reply = cluster.post(json.loads(examples.EXAMPLE_REQUEST.read_text()))
        assert reply["choices"][0]["message"]["content"] == examples.EXPECTED_ANSWER
        record = f"{cluster.url}/cluster/requests/{reply['id'].removeprefix('chatcmpl-')}"
        with urllib.request.urlopen(record, timeout=10) as page:
            spans = json.loads(page.read())["spans"]
        assert [span["note"] for span in spans if span["name"] == "load"] == [note]
    finally:
        cluster.stop()
