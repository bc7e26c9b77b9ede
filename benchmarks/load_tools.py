"""Other people's load tools and `triptych bench` on one paced load, in turns: what each says of one server.

    python -m benchmarks load_tools --rounds 3 --write

Starts `triptych serve` with the demo model on loopback. The tools are in environments of their own, made by
`make load-tools`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.result_page import RESULTS, add_write_flag, fill, publish
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.base.progress.progress import step
from triptych.goodput.launch import launched, parse_shape

HOME = Path(__file__).resolve().parents[1] / ".tools"
RESULT = RESULTS / "load_tools.md"
PATIENCE = 300.0
HUB = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
#: What the tools call the fields of `ToolFigures`.
_FIELDS = ("rate", "ttft", "tpot", "tokens")
_GUIDELLM = "requests_per_second time_to_first_token_ms inter_token_latency_ms output_token_count"
_AIPERF = "request_throughput time_to_first_token inter_token_latency output_sequence_length"
GUIDELLM = dict(zip(_GUIDELLM.split(), _FIELDS, strict=True))
AIPERF = dict(zip(_AIPERF.split(), _FIELDS, strict=True))
OURS = dict(zip(("request_throughput", "mean_ttft_ms", "mean_tpot_ms"), _FIELDS[:3], strict=True))


@dataclass(frozen=True, slots=True)
class ToolLoad:
    """The load that every tool sends: the request rate, and text, output tokens and images per request."""

    requests: int = 60
    rate: float = 2.0
    text_tokens: int = 64
    output_tokens: int = 32
    images: int = 0
    side: int = 64
    api: str = "chat/completions"


@dataclass(frozen=True, slots=True)
class ToolFigures:
    """What a tool says of a load. Times are means in milliseconds; `tokens`: output of a request."""

    completed: int
    failed: int
    rate: float
    ttft: float
    tpot: float
    tokens: float


def guidellm(url: str, load: ToolLoad, folder: Path) -> ToolFigures:
    """`guidellm run`. Its ITL is our TPOT: time after the first token over tokens − 1."""
    if load.images:
        raise ValueError("GuideLLM 0.8.1 with two pictures beside its texts fails in every row, without end")
    texts = f"kind=synthetic_text,prompt_tokens={load.text_tokens},output_tokens={load.output_tokens}"
    _run(
        folder,
        *(_program("guidellm"), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url},request_format=/v1/{load.api}"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO_MODEL}"),
        *("--data", texts),
        *("--profile", f"kind=constant,rate={load.rate}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
    )
    found = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    mean = {name: one["successful"]["mean"] for name, one in found.items() if name in GUIDELLM}
    totals = found["request_totals"]
    return ToolFigures(
        completed=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        **{field: mean[name] for name, field in GUIDELLM.items()},
    )


def aiperf(url: str, load: ToolLoad, folder: Path) -> ToolFigures:
    """`aiperf profile`. Its ITL is our TPOT."""
    side = ("--image-width-mean", load.side, "--image-height-mean", load.side)
    pictures = (*side, "--image-batch-size", load.images)
    _run(
        folder,
        *(_program("aiperf"), "profile", "--model", "demo", "--url", url, "--ui", "none", "--streaming"),
        *("--endpoint-type", "chat" if load.api == "chat/completions" else "completions"),
        *("--tokenizer", DEMO_MODEL, "--use-server-token-count", "--extra-inputs", "ignore_eos:true"),
        *("--isl", load.text_tokens, "--osl", load.output_tokens, *(pictures if load.images else ())),
        *("--request-rate", load.rate, "--arrival-pattern", "constant", "--request-count", load.requests),
        *("--artifact-dir", folder, "--no-server-metrics"),
    )
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    return ToolFigures(
        completed=round(found["request_count"]["avg"]),
        failed=round((found.get("error_request_count") or {"avg": 0})["avg"]),
        **{field: found[name]["avg"] for name, field in AIPERF.items()},
    )


def vllm(url: str, load: ToolLoad, folder: Path) -> ToolFigures:
    """`vllm bench serve`, of the environment that `make test-vllm` makes."""
    chat = load.api == "chat/completions"
    data: tuple[object, ...] = ("random",)
    if load.images:
        pictures = json.dumps({f"({load.side}, {load.side}, 1)": 1.0})
        data = (
            "random-mm",
            "--random-mm-base-items-per-request",
            load.images,
            "--random-mm-bucket-config",
            pictures,
        )
        data += ("--random-mm-limit-mm-per-prompt", json.dumps({"image": load.images, "video": 0}))
    _run(
        folder,
        *(_program("vllm"), "bench", "serve", "--base-url", url, "--endpoint", f"/v1/{load.api}"),
        *("--backend", "openai-chat" if chat else "openai", "--model", "demo", "--tokenizer", DEMO_MODEL),
        *(
            "--dataset-name",
            *data,
            "--random-input-len",
            load.text_tokens,
            "--random-output-len",
            load.output_tokens,
        ),
        *("--num-prompts", load.requests, "--request-rate", load.rate, "--burstiness", 1e6, "--ignore-eos"),
        *("--num-warmups", 0, "--save-result", "--result-dir", folder, "--result-filename", "vllm.json"),
    )
    found = json.loads((folder / "vllm.json").read_text())
    return ToolFigures(
        completed=found["completed"],
        failed=found["failed"],
        **{field: found[name] for name, field in OURS.items()},
        tokens=found["total_output_tokens"] / found["completed"],
    )


def ours(url: str, load: ToolLoad, folder: Path) -> ToolFigures:
    """`triptych bench goodput`."""
    _run(
        folder,
        *(sys.executable, "-m", "triptych.apps.cli", "bench", "goodput", "--url", url),
        *("--arrivals", "constant", "--workload", "text"),
        *("--text-spread", 0, "--output-spread", 0, "--images", load.images),
        *("--image-size", f"{load.side}x{load.side}", "--text-tokens", load.text_tokens),
        *("--output-tokens", load.output_tokens, "--rate", load.rate, "--requests", load.requests),
        *("--warm-up", 0, "--plots", "none", "--output", folder / "ours"),
    )
    found = json.loads((folder / "ours.json").read_text())["windows"][0]
    return ToolFigures(
        completed=found["completed"],
        failed=found["failed"],
        **{field: found[name] for name, field in OURS.items()},
        tokens=found["total_output_tokens"] / found["completed"],
    )


Tool = Callable[[str, ToolLoad, Path], ToolFigures]
TOOLS: dict[str, Tool] = {"guidellm": guidellm, "aiperf": aiperf, "vllm": vllm}


def _program(name: str) -> Path:
    program = HOME / name / "venv" / "bin" / name
    if not program.exists():
        raise FileNotFoundError(f"{name} is not installed in {HOME / name}: use `make load-tools`")
    return program


def _run(folder: Path, *words: object) -> None:
    """Runs a tool; its output is in the error when it fails.

    HF_HUB_OFFLINE is not set: with it AIPerf takes the tokenizer's folder for a name.
    """
    environment = {name: value for name, value in os.environ.items() if name not in HUB}
    with subprocess.Popen(
        [str(word) for word in words],
        cwd=folder, env=environment | {"HOME": str(folder)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=PATIENCE)
        finally:
            # GuideLLM's own processes would outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(f"{words[0]}: {process.returncode}\n{said[-3000:]}")


Means = dict[str, tuple[float, float, float]]


def page(load: ToolLoad, rounds: list[Means], commands: str) -> str:
    """The table: of every tool the median of the rounds, and the median and range of its ratios to ours."""
    lines = []
    for name in rounds[0]:
        words = [name]
        for place in range(3):
            values = [means[name][place] for means in rounds]
            ratios = [means[name][place] / means["triptych bench"][place] for means in rounds]
            words.append(f"{statistics.median(values):.2f}")
            words.append(f"**{statistics.median(ratios):.3f}** ({min(ratios):.3f} – {max(ratios):.3f})")
        lines.append(f"| {' | '.join(words)} |")
    return fill("load_tools", rows="\n".join(lines), rounds=len(rounds), commands=commands, **asdict(load))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of every tool")
    parser.add_argument("--rate", type=float, default=ToolLoad().rate, help="requests per second")
    parser.add_argument("--requests", type=int, default=ToolLoad().requests, help="of one turn")
    parser.add_argument("--tools", default=",".join(TOOLS), help="some of them")
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    load = ToolLoad(requests=options.requests, rate=options.rate)
    chosen = {name: TOOLS[name] for name in options.tools.split(",")}
    systems, rounds = {"triptych bench": ours, **chosen}, list[Means]()
    cluster_of = launched(parse_shape("1E1PD"), "", ("--kv-memory", "64MiB"))
    with cluster_of as cluster, step("turns", options.rounds * len(systems)) as turns:
        for turn in range(options.rounds + 1):  # the first round warms the server and every tool's caches
            means: Means = {}
            for name, tool in systems.items():
                with tempfile.TemporaryDirectory(prefix="load-tools-") as folder:
                    found = tool(cluster.url, load, Path(folder))
                if found.completed != load.requests:
                    raise RuntimeError(f"{name}: {found}")
                means[name] = (found.rate, found.ttft, found.tpot)
                turns.advance(int(turn > 0), note=f"{name}: {found}")
            rounds += [means] if turn else []
    command = f"--tools {options.tools} --rounds {options.rounds} --rate {load.rate:g} "
    command += f"--requests {load.requests} --write"
    publish(page(load, rounds, command), RESULT, write=options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
