"""The text that `triptych serve` prints once the cluster answers: its address, and requests to paste."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from triptych.apps.launch.model_path import AUDIO_DEMO_MODEL, DEMO_MODEL
from triptych.base.config import ServeConfig, front_door_tls

_SPEECH = frozenset({"whisper"})
_TEXTS = frozenset({"bart", "mbart", "t5"})
_PICTURES = frozenset({"vision-encoder-decoder"})
_SOUNDS = frozenset({"qwen2_audio", "qwen3_asr", "glmasr", "voxtral"})


def greeting(config: ServeConfig) -> str:
    """The text for a cluster of this config."""
    proxy, name, path = config.proxy, config.pd.served_model_name, Path(config.model)
    tls = front_door_tls(proxy) is not None
    host = f"[{proxy.host}]" if ":" in proxy.host else proxy.host
    url = f"{'https' if tls else 'http'}://{host}:{proxy.port}"
    lines = [
        "",
        f"Triptych answers for {name!r} at {url} (gRPC {host}:{proxy.grpc_port}).",
        "",
        *_example(path, str(Path(sys.executable).with_name("triptych")), url),
    ]
    if tls:
        lines += [
            "",
            "Say a host name of its certificate in place of the address. Where the system does not know the",
            "certificate's CA, give curl --cacert FILE, and triptych ask --ca-file FILE.",
        ]
    if proxy.api_key or proxy.api_key_file:
        lines += [
            "",
            "It asks for an API key: export TRIPTYCH_API_KEY=…, and give curl",
            '  -H "Authorization: Bearer $TRIPTYCH_API_KEY"',
        ]
    return "\n".join([*lines, "", "Ctrl-C ends it.", "", ""])


def _example(path: Path, command: str, url: str) -> list[str]:
    if path == DEMO_MODEL:
        from triptych.demo import examples

        return [
            "Paste one of these, from any folder:",
            f"  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' "
            f"-d @{examples.EXAMPLE_REQUEST}",
            f'  {command} ask "{examples.EXAMPLE_QUESTION}" --image {examples.EXAMPLE_IMAGE} --url {url}',
            "",
            f"The picture: {examples.EXAMPLE_IMAGE}",
            f"The answer:  {examples.EXPECTED_ANSWER}",
        ]
    if path == AUDIO_DEMO_MODEL:
        return [
            "Paste these, one after another, in a folder of your own:",
            f"  {command} tones 5551234 -o tones.wav",
            f"  {command} transcribe tones.wav --url {url}",
            f"  curl -s {url}/v1/audio/transcriptions -F file=@tones.wav -F response_format=verbose_json",
            "",
            "The answer: 5551234; that of curl has its times too.",
        ]
    return ["Paste this, from any folder:", f"  {first_request(path, command, url)}"]


def first_request(model: Path, command: str, url: str) -> str:
    """A request for the kind of checkpoint at `model`; `command` is how to call `triptych`."""
    kind = model_type(model)
    if kind in _SPEECH:
        return f"{command} transcribe /path/to/speech.wav --url {url}"
    if kind in _TEXTS:
        return _completion(url, {"prompt": "A long article", "max_tokens": 64})
    if kind in _PICTURES:
        return _completion(url, {"multi_modal_data": {"image": "https://…"}, "max_tokens": 64})
    if kind in _SOUNDS:
        return f'{command} ask "What is heard?" --audio /path/to/clip.wav --url {url}'
    return f'{command} ask "What is in the image?" --image /path/to/picture.png --url {url}'


def _completion(url: str, body: dict[str, object]) -> str:
    data = json.dumps(body, ensure_ascii=False)
    return f"curl -s {url}/v1/completions -H 'Content-Type: application/json' -d '{data}'"


def model_type(model: Path) -> str:
    """The `model_type` of its config.json; "" where that cannot be read."""
    try:
        return str(json.loads((model / "config.json").read_text(encoding="utf-8")).get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""
