"""``kvkeep size`` on configurations of known cost, and what it says when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvkeep.cli import main
from kvkeep.core.geometry import KVGeometry
from kvkeep.serve.models import bundled_model

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    return tmp_path


def test_json_has_the_published_figures(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--model", str(model), "--memory", "24GiB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes_per_token"] == 128 * 1024
    assert answer["bytes_per_page"] == 2 * 2**20
    assert answer["pages"] == 12288
    assert answer["tokens"] == 196608
    assert answer["prompts"] == {"8192": 24, "32768": 6, "131072": 1}
    assert answer["windows"] == [None] * 32


def test_ranks_dtype_and_page_size_count(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--tp", "8", "--dtype", "fp8", "--page-size", "100", "--memory", "1 GB"]
    assert main(["size", "--model", str(model / "config.json"), "--json", *chosen]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes_per_token"] == 128 * 1024 // 16
    assert answer["pages"] == 10**9 // (100 * 8192)
    assert answer["prompts"]["8192"] == answer["pages"] // 82  # 8192 tokens begin an 82nd page


LINES = {
    "a token": "128 KiB",
    "a page of 16 tokens": "2 MiB",
    "pages in 24 GiB": "12,288",
    "tokens in them": "196,608",
    "prompts of 8k": "24",
    "prompts of 32k": "6",
    "prompts of 128k": "1",
}


@pytest.mark.parametrize("rich", [True, False])
def test_the_table_with_rich_and_without(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rich: bool
) -> None:
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setitem(sys.modules, "rich.table", None)
    assert main(["size", "--model", str(model), "--memory", "24GiB"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == f"KV of {model}: 32 layers × 8 KV heads × 128, bfloat16"
    shown = [line.strip("│ ") for line in lines if not set(line) <= set("┌─┬┐└┴┘")]
    assert len(shown) == len(LINES)
    for line, (name, value) in zip(shown, LINES.items(), strict=True):
        assert line.startswith(name)
        assert line.endswith(" " + value)
    assert ("│" in lines[1]) == rich


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "32 layers × a latent of 512 + 64, b"),
        ({"v_head_dim": 64}, "32 layers × 8 KV heads × 128/64, b"),
        ({"sliding_window": 4096}, "32 layers slide (their pages hold all tokens)"),
    ],
)
def test_what_is_special_is_said(
    model: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, int], shown: str
) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA_31_8B | fields))
    assert main(["size", "--model", str(model), "--memory", "24GiB", "--tp", "8"]) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert shown in title
    assert title.endswith(", one of 8 ranks")


def test_the_model_that_ships_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--memory", "1GiB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    geometry = KVGeometry.from_config(bundled_model())
    assert answer["bytes_per_token"] == geometry.bytes_per_token


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "24G"], "'24G' is no amount of memory; write a number and a unit"),
        (["--memory", "1MiB"], "holds no page; a page of 16 tokens needs 2 MiB"),
        (["--memory", "24GiB", "--page-size", "0"], "page_size is 0"),
        (["--memory", "24GiB", "--tp", "3"], "tp is 3 and the model has 8 KV heads"),
        (["--memory", "24GiB", "--dtype", "fp7"], "dtype is 'fp7'"),
        (["--memory", "24GiB", "--model", "/no/such/model"], "cannot read /no/such/model"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["size", "--model", str(model), *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("kvkeep: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_it_needs_no_torch(model: Path) -> None:
    code = (
        "import sys; from kvkeep.cli import main\n"
        f"main(['size', '--model', {str(model)!r}, '--memory', '24GiB'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
