"""Other people's load tools and `triptych bench` on one paced load, in turns: what each says of one server.

    python -m benchmarks load_tools --rounds 3 --write

Starts `triptych serve` with the demo model on loopback. `make load-tools` installs the tools.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.result_page import RESULTS, TEMPLATES, fill, page_parser, publish
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.base.progress import Progress
from triptych_bench.goodput.launch import launched, parse_shape

HOME = Path(__file__).resolve().parents[1] / ".tools"
RESULT = RESULTS / "load_tools.md"
PATIENCE = 300.0
#: What the tools call `rate`, `ttft`, `tpot` and `tokens` of `ToolFigures`; vLLM as we do.
GUIDELLM = ("requests_per_second", "time_to_first_token_ms", "inter_token_latency_ms", "output_token_count")
AIPERF = ("request_throughput", "time_to_first_token", "inter_token_latency", "output_sequence_length")
OURS = ("request_throughput", "mean_ttft_ms", "mean_tpot_ms")


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
    """`guidellm run`. Its ITL is our TPOT. A picture is a data set: several of one are turns to it."""
    picture = f"kind=synthetic_image,width={load.side},height={load.side},seed="
    pictures = [word for seed in range(load.images) for word in ("--data", f"{picture}{seed}")]
    texts = f"kind=synthetic_text,prompt_tokens={load.text_tokens},output_tokens={load.output_tokens}"
    run_tool(
        folder,
        # Its ten processes would take two cores from the server.
        *("env", "GUIDELLM__MAX_WORKER_PROCESSES=1", program("guidellm"), "run"),
        *("--backend", f"kind=openai_http,target={url},request_format=/v1/{load.api}"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO_MODEL}"),
        *("--data", texts, *pictures, "--profile", f"kind=constant,rate={load.rate}", "--constraint"),
        *(f"kind=max_requests,count={load.requests}", "--disable-console-interactive"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
    )
    result = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    ended = result["request_totals"]
    means = [result[name]["successful"]["mean"] for name in GUIDELLM]
    return ToolFigures(ended["successful"], ended["errored"] + ended["incomplete"], *means)


def aiperf(url: str, load: ToolLoad, folder: Path) -> ToolFigures:
    """`aiperf profile`. Its ITL is our TPOT."""
    side = load.side
    pictures = ("--image-width-mean", side, "--image-height-mean", side, "--image-batch-size", load.images)
    run_tool(
        folder,
        *(program("aiperf"), "profile", "--model", "demo", "--url", url, "--ui", "none", "--streaming"),
        *("--endpoint-type", "chat" if load.api == "chat/completions" else "completions"),
        *("--tokenizer", DEMO_MODEL, "--use-server-token-count", "--extra-inputs", "ignore_eos:true"),
        *("--isl", load.text_tokens, "--osl", load.output_tokens, *(pictures if load.images else ())),
        *("--request-rate", load.rate, "--arrival-pattern", "constant", "--request-count", load.requests),
        *("--artifact-dir", folder, "--no-server-metrics"),
    )
    result = json.loads((folder / "profile_export_aiperf.json").read_text())
    failed = (result.get("error_request_count") or {"avg": 0})["avg"]
    means = [result[name]["avg"] for name in AIPERF]
    return ToolFigures(round(result["request_count"]["avg"]), round(failed), *means)


def vllm(url: str, load: ToolLoad, folder: Path) -> ToolFigures:
    """`vllm bench serve`, of the environment that `make test-vllm` makes."""
    chat, pictures = load.api == "chat/completions", tuple[object, ...]()
    if load.images:
        pictures = ("--random-mm-base-items-per-request", load.images, "--random-mm-bucket-config")
        pictures += (json.dumps({f"({load.side}, {load.side}, 1)": 1.0}), "--random-mm-limit-mm-per-prompt")
        pictures += (json.dumps({"image": load.images, "video": 0}),)
    run_tool(
        folder,
        *(program("vllm"), "bench", "serve", "--base-url", url, "--endpoint", f"/v1/{load.api}"),
        *("--backend", "openai-chat" if chat else "openai", "--model", "demo", "--tokenizer", DEMO_MODEL),
        *("--dataset-name", "random-mm" if load.images else "random", *pictures),
        *("--random-input-len", load.text_tokens, "--random-output-len", load.output_tokens),
        *("--num-prompts", load.requests, "--request-rate", load.rate, "--burstiness", 1e6, "--ignore-eos"),
        *("--num-warmups", 0, "--save-result", "--result-dir", folder, "--result-filename", "vllm.json"),
    )
    return _named_alike(json.loads((folder / "vllm.json").read_text()))


def inference_perf(url: str, load: ToolLoad, folder: Path) -> ToolFigures:
    """`inference-perf` on a trace with equal gaps. TPOT is to the end: its own is to the last text."""
    seconds, chat = math.ceil(load.requests / load.rate), load.api == "chat/completions"
    times = [divmod(index / load.rate, 60) for index in range(load.requests)]
    lines = [f"2026-01-01 00:{minute:02.0f}:{second:09.6f},1,1\n" for minute, second in times]
    (folder / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    size, count = {"width": load.side, "height": load.side}, {"type": "fixed", "mean": load.images}
    (folder / "config.yaml").write_text((TEMPLATES / "inference_perf.yaml").read_text().format(
        **asdict(load), url=url, folder=folder, tokenizer=DEMO_MODEL, type="chat" if chat else "completion",
        pictures=json.dumps({"image": {"count": count, "resolutions": size}} if chat else None),
        seconds=seconds, stage_rate=(load.requests + 0.5) / seconds,
    ))  # fmt: skip
    run_tool(folder, program("inference-perf"), "-c", folder / "config.yaml")
    report = json.loads((folder / "summary_lifecycle_metrics.json").read_text())
    result, failed = report["successes"], report["failures"]["count"]
    rate, tokens = result["throughput"]["requests_per_sec"], result["output_tokens"]["mean"]
    ttft, e2e = (1000 * result["latency"][of]["mean"] for of in ("time_to_first_token", "request_latency"))
    return ToolFigures(result["count"], failed, rate, ttft, (e2e - ttft) / (tokens - 1), tokens)


def ours(url: str, load: ToolLoad, folder: Path) -> ToolFigures:
    """`triptych bench goodput`."""
    run_tool(
        folder,
        *(sys.executable, "-m", "triptych.apps.cli", "bench", "goodput", "--url", url),
        *("--arrivals", "constant", "--workload", "text"),
        *("--text-spread", 0, "--output-spread", 0, "--images", load.images),
        *("--image-size", f"{load.side}x{load.side}", "--text-tokens", load.text_tokens),
        *("--output-tokens", load.output_tokens, "--rate", load.rate, "--requests", load.requests),
        *("--warm-up", 0, "--plots", "none", "--output", folder / "ours"),
    )
    return _named_alike(json.loads((folder / "ours.json").read_text())["windows"][0])


def _named_alike(result: dict[str, Any]) -> ToolFigures:
    """The figures of a result with vLLM's names, which ours has, too."""
    means = [*(result[name] for name in OURS), result["total_output_tokens"] / result["completed"]]
    return ToolFigures(result["completed"], result["failed"], *means)


Tool = Callable[[str, ToolLoad, Path], ToolFigures]
Means = dict[str, tuple[float, float, float]]
TOOLS: dict[str, Tool] = {"guidellm": guidellm, "aiperf": aiperf, "vllm": vllm}
TOOLS["inference-perf"] = inference_perf


def program(name: str) -> Path:
    """Where this tool is; FileNotFoundError where it is not installed."""
    path = HOME / name / "venv" / "bin" / name
    if not path.exists():
        raise FileNotFoundError(f"{name} is not installed in {HOME / name}: use `make test-load-tools`")
    return path


def run_tool(folder: Path, *words: object) -> None:
    """Runs a tool in this folder; its output is in the error when it fails.

    HF_HUB_OFFLINE is not set: with it AIPerf takes the tokenizer's folder for a name.
    """
    with subprocess.Popen(
        [str(word) for word in words],
        cwd=folder, stdin=subprocess.DEVNULL,
        env={n: v for n, v in os.environ.items() if not n.endswith("_OFFLINE")} | {"HOME": str(folder)},
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


def page(load: ToolLoad, rounds: list[Means], tools: str) -> str:
    """The table: of every tool the median of the rounds, and median and range of its ratios to ours."""
    lines = []
    for name in rounds[0]:
        words = [name]
        for place in range(3):
            values = [means[name][place] for means in rounds]
            ratios = [means[name][place] / means["triptych bench"][place] for means in rounds]
            words.append(f"{statistics.median(values):.2f}")
            words.append(f"**{statistics.median(ratios):.3f}** ({min(ratios):.3f} – {max(ratios):.3f})")
        lines.append(f"| {' | '.join(words)} |")
    return fill("load_tools", rows="\n".join(lines), rounds=len(rounds), tools=tools, **asdict(load))


def endless_model(folder: Path) -> Path:
    """A copy of the demo model whose special tokens score 0: it never ends, and all its tokens have text."""
    file = shutil.copytree(DEMO_MODEL, folder / "demo") / "model.safetensors"
    weights = load_file(file)
    weights["model.language_model.embed_tokens.weight"][647:] = 0  # <|endoftext|> and after
    save_file(weights, file, {"format": "pt"})
    return file.parent


def main() -> int:
    parser = page_parser(__doc__, RESULT, rounds=3, rate=2.0, requests=40, text=1024)
    parser.add_argument("--tools", default=",".join(TOOLS), help="some of them")
    options = parser.parse_args()
    load = ToolLoad(requests=options.requests, rate=options.rate, text_tokens=options.text)
    chosen = {name: TOOLS[name] for name in options.tools.split(",")}
    systems, rounds = {"triptych bench": ours, **chosen}, list[Means]()
    with tempfile.TemporaryDirectory() as home:
        cluster_of = launched(parse_shape("1E1PD"), str(endless_model(Path(home))), ("--kv-memory", "64MiB"))
        with cluster_of as cluster, Progress("turns", options.rounds * len(systems)) as turns:
            for turn in range(options.rounds + 1):  # the first round warms the server and every tool's caches
                means: Means = {}
                for name, tool in systems.items():
                    with tempfile.TemporaryDirectory(prefix="load-tools-") as folder:
                        result = tool(cluster.url, load, Path(folder))
                    if (
                        result.failed or result.completed < load.requests - 1
                    ):  # GuideLLM may lose one silently
                        raise RuntimeError(f"{name}: {result}")
                    means[name] = (result.rate, result.ttft, result.tpot)
                    turns.advance(int(turn > 0), note=f"{name}: {result}")
                rounds += [means] if turn else []
    publish(page(load, rounds, options.tools), RESULT, write=options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
