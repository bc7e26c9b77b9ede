"""The flags of --engine vllm: each mistake names the flag and the remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.pd_worker.vllm.connection import check_engine, read_key

GOOD = PDConfig(engine="vllm", engine_url="http://10.0.0.7:8000", dtype="bfloat16")


@pytest.mark.parametrize("url", ["http://10.0.0.7:8000", "https://vllm.svc:443/prefix", "http://[::1]:8000/"])
def test_an_address_with_host_and_port_is_taken(url):
    check_engine(replace(GOOD, engine_url=url))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device_memory": 2}, "--gpu-memory-utilization"),
        ({"kv_memory": 1 << 20}, "--kv-cache-memory-bytes"),
        ({"engine_url": "10.0.0.7:8000"}, "give http://host:port"),
        ({"engine_url": "unix:///run/vllm"}, "give http://host:port"),
        ({"engine_url": "http://host:99999999"}, "--engine-url"),
        ({"engine_url": "http://me:secret@host:8000"}, "--engine-key-file"),
        ({"engine_url": "http://host:8000/?a=b"}, "leave out what comes after the path"),
        ({"dtype": "auto"}, "needs --dtype"),
        ({"tensor_parallel": 2}, "--tensor-parallel-size"),
        ({"quantization": "int8"}, "--quantization is for --engine native"),
    ],
)
def test_a_mistake_names_the_flag_and_the_remedy(given, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_engine(replace(GOOD, **given))
    assert "secret" not in str(error.value)


def test_the_key_is_the_files_without_its_line_end(tmp_path):
    file = tmp_path / "key"
    file.write_text("sesame\n")
    assert read_key(str(file)) == "sesame" and read_key("") == ""


@pytest.mark.parametrize("text", ["", "\n", "two\nlines", "schlüssel"])
def test_a_file_without_a_usable_key_is_refused(tmp_path, text):
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ConfigError, match="holds no key"):
        read_key(str(file))
