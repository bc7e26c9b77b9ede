from __future__ import annotations

from pathlib import Path

import pytest

from triptych.base.errors import ConfigError
from triptych.goodput.load.azure_lmm import IMAGES, TEXT_TOKENS, lmm_workload, read_azure_csv
from triptych.goodput.load.workload import plan_requests

HEAD = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"


def test_a_plan_has_the_shares_of_the_trace() -> None:
    planned = plan_requests(lmm_workload(), 4000, 7)
    counts = [len(request.pictures) for request in planned]
    for count, share in IMAGES:
        assert counts.count(count) / len(counts) == pytest.approx(share, abs=0.025)
    tokens = sorted(request.text_tokens for request in planned)
    for share, below in TEXT_TOKENS[3:-2]:
        assert tokens[round(share * len(tokens))] == pytest.approx(below, rel=0.15)


def test_requests_of_more_pictures_than_the_limit_have_the_limit() -> None:
    shares = dict(lmm_workload(25).images)
    assert max(shares) == 25
    assert sum(shares.values()) == pytest.approx(1.0)


def test_the_published_file_is_read_with_the_tokens_of_pictures_taken_off(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        HEAD + "2024-10-15T12:00:00.250Z,0,770,491\n"
        "2024-10-15T12:00:02.250Z,1,949,126\n2024-10-15T12:00:04.250Z,16,900,0\n"
    )
    (first, text), (second, single), (third, grid) = read_azure_csv(path, speed=2.0)
    assert (first, second, third) == (0.0, 1.0, 2.0)
    assert (text.text_tokens, text.output_tokens, text.pictures) == (770, 491, ())
    assert (single.text_tokens, [picture.width for picture in single.pictures]) == (949 - 576, [768])
    assert (grid.text_tokens, grid.output_tokens, len(set(grid.pictures))) == (1, 1, 16)


@pytest.mark.parametrize(
    "line", ["yesterday,0,1,1\n", "2024-10-15T12:00:00Z,one,1,1\n", "2024-10-15T12:00:00Z,1\n"]
)
def test_a_line_that_is_none_of_the_trace_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + line)
    with pytest.raises(ConfigError, match=r"trace\.csv line 2: .*its columns are TIMESTAMP"):
        read_azure_csv(path)


def test_a_file_that_is_not_there_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_azure_csv(tmp_path / "trace.csv")
    (tmp_path / "trace.csv").write_text(HEAD)
    with pytest.raises(ConfigError, match="holds no request"):
        read_azure_csv(tmp_path / "trace.csv")
