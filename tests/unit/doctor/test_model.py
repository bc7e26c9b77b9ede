"""Checks of a model and of a store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from support.data.adapters import RANK, write_adapter
from support.data.checkpoints import build_checkpoint, edit_config
from support.data.pictures import picture
from triptych.apps.cli.app import app
from triptych.apps.doctor import model, rows
from triptych.apps.doctor import store as judge
from triptych.apps.doctor.finding import CheckOutcome, CheckResult
from triptych.apps.doctor.model import check_model, device_finding, largest_image
from triptych.apps.doctor.store import check_store, check_workers
from triptych.base.config import GIB, MIB, ClusterConfig, EncoderConfig, PDConfig
from triptych.base.errors import ConfigError
from triptych.base.types import WorkerInfo
from triptych.ec_connector import int8_rows
from triptych.encoder_worker.loading import scales_of
from triptych.models.checkpoint import quantized
from triptych.models.registry import FAMILIES, load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.frontend.prompt import open_checkpoint
from triptych.pd_worker.vllm import connection
from triptych.store.bulk import StoreMemory


@pytest.mark.parametrize(
    ("device", "gpus", "verdict"),
    [
        ("cpu", [], CheckOutcome.OK),
        ("cpu", ["H200"], CheckOutcome.OK),
        ("cuda", ["H200"], CheckOutcome.OK),
        ("cuda:1", ["H200", "H200"], CheckOutcome.OK),
        ("cuda", [], CheckOutcome.FAIL),
        ("cuda:1", ["H200"], CheckOutcome.FAIL),
        ("cuda:x", ["H200"], CheckOutcome.FAIL),
        ("tpu", [], CheckOutcome.FAIL),
    ],
)
def test_a_device_is_one_that_torch_sees(device, gpus, verdict):
    assert device_finding(device, gpus).verdict is verdict


def _results(config: ClusterConfig) -> dict[str, CheckResult]:
    return {result.check: result for result in check_model(config, config.model)}


def test_the_demo_model_has_sizes_and_memory_and_loads():
    results = _results(ClusterConfig())
    assert {result.verdict for result in results.values()} == {CheckOutcome.OK}
    assert results["family"].found == "qwen3_vl, of image"
    assert results["encoder side"].found == "1.9 M parameters, 7.3 MiB"
    assert results["decoder side"].found == "1.5 M parameters, 5.7 MiB"
    assert results["weights"].found == "load: 7.3 MiB in an encoder, 5.7 MiB in a PD worker"
    assert "128x128 pixels (16 rows)" in results["largest image"].found


def test_what_rows_in_8_bits_cost_is_measured_on_given_pictures(tmp_path: Path):
    picture(1, 96, 64).save(tmp_path / "a.png")
    picture(2, 64, 128).convert("L").save(tmp_path / "b.jpg")
    (tmp_path / "notes.txt").write_text("no picture")
    config = ClusterConfig(encoder=EncoderConfig(ec_store_rows="int8"))
    found = {result.check: result for result in check_model(config, "", str(tmp_path))}["int8 rows"].found
    assert "at 32 of 32 places, over 2 pictures" in found
    assert _results(config)["int8 rows"].verdict is CheckOutcome.NOTE
    assert "int8 rows" not in _results(ClusterConfig())
    for folder in (tmp_path / "empty", tmp_path / "missing"):
        if folder.name == "empty":
            folder.mkdir()
        with pytest.raises(ConfigError, match="--pictures .* no pictures: name a folder"):
            list(check_model(config, "", str(folder)))


def test_the_loss_grows_with_the_error_of_the_rows_and_is_none_without(monkeypatch):
    path = build_checkpoint("qwen3_vl")
    options = {"device": torch.device("cpu"), "dtype": torch.float32}
    encoder = load_encoder(path, **options)
    decoder = load_decoder(path, **options, attn_implementation=ATTENTION_NAME)
    prompts, _ = open_checkpoint(path, decoder, 512)
    scales = scales_of(path, encoder.width)

    def divergence(largest: float | None) -> float:
        given = (lambda output, first, count: output.data) if largest is None else rows.rows_of
        with monkeypatch.context() as patch:
            patch.setattr(rows, "rows_of", given)
            if largest is None:
                patch.setattr(rows, "packed", lambda made, scales: made)
            else:
                patch.setattr(int8_rows, "_LARGEST", largest)
            loss = rows.loss_of(picture(1, 96, 64), scales, encoder, decoder, prompts)
        assert len(loss.divergence) == len(loss.same) == rows.ANSWER_TOKENS
        return float(loss.divergence.mean())

    none, fine, coarse = divergence(None), divergence(127), divergence(2)
    assert none == 0 < fine < coarse


def test_automatic_kv_memory_is_a_sum_and_never_zero():
    results = _results(ClusterConfig())
    assert "automatic: what is left beside the weights, (" in results["KV cache"].found
    assert " x 0.5 = " in results["KV cache"].found
    assert not [line for line in results["memory"].details if line.endswith(" 0 B")]
    assert [line for line in results["memory"].details if line.endswith(" automatic")]


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_config_json_alone_says_what_the_weights_say(family: str, tmp_path: Path):
    path = build_checkpoint(family, tmp_path / "model")
    whole = _results(ClusterConfig(model=str(path)))
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in ("config.json", "preprocessor_config.json"):
        if (path / file).exists():
            shutil.copy(path / file, alone / file)
    results = _results(ClusterConfig(model=str(alone)))
    assert results["model"].verdict is CheckOutcome.NOTE and "tokenizer" in results["model"].remedy
    assert results.keys() == whole.keys() - {"weights"}
    same = ("family", "dtype", "encoder side", "decoder side", "embedding", "model length", "largest image")
    for check in {*same, "cross"} & whole.keys():
        assert results[check].found == whole[check].found


def test_a_model_that_does_not_fit_is_not_loaded_and_its_memory_is_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model, "available_memory", lambda: 1 << 30)
    shown = CliRunner().invoke(app, ["check"])
    assert isinstance(shown.exception, ConfigError)
    assert "automatic: what is left beside the weights, and nothing is left" in shown.output
    assert "weights of 2 workers" in shown.output and "load: " not in shown.output
    assert "FAIL  model" in shown.output and "It fits." not in shown.output


def _no_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text("{")


def _no_processor_size(path: Path) -> None:
    (path / "preprocessor_config.json").write_text(
        '{"size": 5, "image_processor_type": "Qwen2VLImageProcessor"}'
    )


@pytest.mark.parametrize(
    ("damage", "named"),
    [(_no_tokenizer, "tokenizer"), (_no_processor_size, "own sample")],
)
def test_what_the_workers_would_refuse_is_refused(damage, named, tmp_path):
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    assert "weights" in _results(ClusterConfig(model=str(path)))
    damage(path)
    with pytest.raises(ConfigError, match=named):
        _results(ClusterConfig(model=str(path)))


def test_adapters_are_read_and_refused_as_the_pd_worker_does(tmp_path):
    path = build_checkpoint("qwen3_vl")
    folder = write_adapter(path, tmp_path / "sql", 1)

    def results(modules: str, **flags: object) -> dict[str, CheckResult]:
        return _results(ClusterConfig(model=str(path), pd=PDConfig(lora_modules=modules, **flags)))

    served = {"engine_url": "http://127.0.0.1:8100"}
    assert results(f"sql={folder}", **served)["adapters"].found == f"sql of rank {RANK}"
    with pytest.raises(ConfigError, match=f"{path.name!r} is the model's own name"):
        results(f"{path.name}={folder}", **served)
    with pytest.raises(ConfigError, match="the native engine applies no adapters"):
        results(f"sql={folder}")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="--lora-modules sql: .* has no adapter_model.safetensors"):
        results(f"sql={folder}", **served)


def test_a_dtype_that_a_vllm_of_the_workers_own_lacks_is_refused_as_there(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "vllm_program", lambda: "/venv/bin/vllm")
    avx512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
    monkeypatch.setattr(quantized, "cpu_flags", lambda: avx512)
    awq = {"quant_method": "awq", "bits": 4}
    path = edit_config(build_checkpoint("qwen3_vl", tmp_path / "model"), quantization_config=awq)
    with pytest.raises(ConfigError, match=r"awq \(4 bits\).*give --dtype float16"):
        _results(ClusterConfig(model=str(path), pd=PDConfig(engine="vllm")))


#: Up to 4096x4096 pixels, a row for 32x32 of them.
QWEN = {"size": {"longest_edge": 1 << 24, "shortest_edge": 1 << 16}, "patch_size": 16, "merge_size": 2}


def test_a_model_whose_largest_image_fits_scales_larger_ones_down():
    result = largest_image(QWEN, {"--max-model-len 32768": 32767, "--encoder-cache-memory 1 GiB": 16384})
    assert result.verdict is CheckOutcome.OK
    assert result.found == "4096x4096 pixels (16384 rows); larger ones are scaled down to it"


def test_the_flag_with_the_fewest_rows_is_named_with_what_a_request_may_ask_for():
    result = largest_image(QWEN, {"--max-model-len 32768": 32767, "--encoder-cache-memory 256 MiB": 8192})
    assert result.verdict is CheckOutcome.NOTE
    assert result.found.startswith("2880x2880 pixels (8192 rows) by --encoder-cache-memory 256 MiB;")
    assert "raise --encoder-cache-memory, or" in result.remedy and "max_pixels 8388608" in result.remedy


def test_limits_without_place_for_a_row_fail():
    assert largest_image(QWEN, {"--max-model-len 1": 0}).verdict is CheckOutcome.FAIL


@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        {"size": {"height": 336, "width": 336}},
    ],
)
def test_a_tower_of_one_size_takes_any_image(settings):
    assert "scaled to 336x336 pixels" in largest_image(settings, {"--max-model-len 9": 8}).found


async def test_a_store_that_is_away_is_one_finding_without_its_password():
    ((heading, (result,)),) = await check_store("redis://:hidden-password@127.0.0.1:1/0")
    assert result.verdict is CheckOutcome.FAIL and "hidden-password" not in heading + result.found
    assert "start the store" in result.found


async def test_a_worker_that_nobody_reaches_is_named():
    infos = [
        WorkerInfo(address, "pd", "i", "k" * 64, "m", (), {}, "image")
        for address in ("127.0.0.1:1", "[::1]:1", "nonsense", "127.0.0.1:99999999")
    ]
    findings = await check_workers(infos, seconds=2.0)
    assert {finding.verdict for finding in findings} == {CheckOutcome.FAIL}
    assert all(info.address in finding.found for info, finding in zip(infos, findings, strict=True))


OK, NOTE, FAIL = CheckOutcome.OK, CheckOutcome.NOTE, CheckOutcome.FAIL


def memory(policy: str = "volatile-lru", *, maximum: int = GIB, used: int = MIB) -> StoreMemory:
    return StoreMemory(max_bytes=maximum, used_bytes=used, policy=policy)


JUDGED = {
    "a new Valkey": (judge.judge_version({"valkey_version": "9.1.2", "redis_version": "7.2.4"}), OK, ""),
    "Redis 7": (judge.judge_version({"redis_version": "7.0.15"}), OK, ""),
    "Redis 6": (judge.judge_version({"redis_version": "6.2.7"}), NOTE, "Redis 7"),
    "no version": (judge.judge_version({}), NOTE, "Redis 7"),
    "the right policy": (judge.judge_policy(memory()), OK, ""),
    "a policy that evicts all": (judge.judge_policy(memory("allkeys-lfu")), FAIL, "volatile-lru"),
    "a policy that evicts nothing": (judge.judge_policy(memory("noeviction")), FAIL, "volatile-lru"),
    "another policy": (judge.judge_policy(memory("volatile-ttl")), NOTE, "volatile-lru"),
    "a limit": (judge.judge_memory(memory(), {}), OK, ""),
    "no limit": (judge.judge_memory(memory(maximum=0), {}), FAIL, "maxmemory"),
    "a limit above the machine": (
        judge.judge_memory(memory(maximum=4 * GIB), {"total_system_memory": str(4 * GIB)}),
        NOTE,
        "below 3.0 GiB",
    ),
    "values on disk": (judge.judge_persistence({"aof_enabled": "1"}), NOTE, "appendonly no"),
    "a replica": (judge.judge_role({"role": "slave", "master_host": "h"}), FAIL, "primary"),
    "a primary": (judge.judge_role({"role": "master"}), OK, ""),
    "a near server": (judge.judge_latency([0.0001, 0.0002, 0.3]), OK, ""),
    "a far server": (judge.judge_latency([0.02, 0.03, 0.03]), NOTE, "zone"),
    "a fast network": (judge.judge_bandwidth(1e9, 2e9), OK, ""),
    "a slow network": (judge.judge_bandwidth(1e9, 1e7), NOTE, "Redis Cluster"),
    "a user that may only write": (judge.judge_bandwidth(1e9, None), OK, ""),
    "a user that may neither": (judge.judge_bandwidth(None, None), NOTE, "administrator"),
    "a certificate that ends soon": (judge.judge_expiry(3.0), NOTE, "renew"),
    "a certificate that lasts": (judge.judge_expiry(90.0), OK, ""),
    "plain text over a network": (judge.judge_plain("10.0.0.1"), NOTE, "rediss://"),
    "plain text on this machine": (judge.judge_plain("127.0.0.1"), OK, ""),
    "no login": (judge.judge_login(True), NOTE, "triptych store acl"),
    "slots without a server": (judge.judge_parts([0.5, 0.3]), FAIL, "redis-cli"),
    "no server at all": (judge.judge_parts([]), FAIL, "redis-cli"),
    "all slots": (judge.judge_parts([0.5, 0.3, 0.2]), OK, ""),
    "a clock that is nearly the same": (judge.judge_clock(0.1), OK, ""),
    "a clock that is behind": (judge.judge_clock(-30.0), FAIL, "NTP"),
    "a clock that is ahead": (judge.judge_clock(30.0), FAIL, "NTP"),
}


@pytest.mark.parametrize("what", JUDGED)
def test_what_is_not_fine_says_what_helps(what: str) -> None:
    result, verdict, helps = JUDGED[what]
    assert result.verdict is verdict
    assert result.found
    assert helps in result.remedy
    assert bool(result.remedy) == (verdict is not OK)
