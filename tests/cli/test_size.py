"""``kvkeep size`` on configurations of known cost, and what it says when it cannot."""

from __future__ import annotations

import json
import re
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
    assert answer["bytes"] == {"8192": 2**30, "32768": 2**32, "131072": 2**34}
    assert answer["sequences"] == answer["prompts"]
    assert answer["bytes_per_state"] == 0
    [group] = answer["groups"]
    assert group == {
        "kind": "full", "layers": list(range(32)), "span": None, "kv_heads": 8, "head_dim": 128,
        "value_dim": 128, "latent_dim": None, "state": [], "grid": 1,
        "bytes_per_token": 128 * 1024, "bytes_per_state": 0, "bytes": answer["bytes"],
    }  # fmt: skip


def test_ranks_dtype_and_page_size_count(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--tp", "8", "--dtype", "fp8", "--page-size", "100", "--memory", "1 GB"]
    assert main(["size", "--model", str(model / "config.json"), "--json", *chosen]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes_per_token"] == 128 * 1024 // 16
    assert answer["pages"] == 10**9 // (100 * 8192)
    assert answer["prompts"]["8192"] == answer["pages"] // 82  # 8192 tokens begin an 82nd page


LINES = {
    "a token": ["128 KiB"],
    "a page of 16 tokens": ["2 MiB"],
    "pages in 24 GiB": ["12,288"],
    "tokens in them": ["196,608"],
    "bytes of a sequence": ["a token", "8k", "32k", "128k"],
    "32 × full": ["128 KiB", "1 GiB", "4 GiB", "16 GiB"],
    "at once in 24 GiB": ["24", "6", "1"],
}


def shown(lines: list[str]) -> dict[str, list[str]]:
    """Rows of tables: name → the other cells. Two spaces, or a line, are between cells."""
    rows: dict[str, list[str]] = {}
    for line in lines:
        cells = [cell.strip() for cell in re.split(r"│|  +", line) if cell.strip()]
        if cells and not set(line) <= set("┌─┬┐└┴┘ "):
            rows[cells[0]] = cells[1:]
    return rows


@pytest.mark.parametrize("rich", [True, False])
def test_the_tables_with_rich_and_without(
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
    assert shown(lines) == LINES
    assert ("│" in lines[1]) == rich
    ends = {len(line.rstrip()) for line in lines if line.strip().startswith(("32 ×", "at once"))}
    assert len(ends) == 1  # columns are aligned to the right


GEMMA = LLAMA_31_8B | {
    "model_type": "gemma3_text", "num_hidden_layers": 12, "head_dim": 128, "sliding_window": 1024,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_next", "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_key_head_dim": 128, "dtype": "bfloat16",
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
}  # fmt: skip
STATE = (8192 * 4 * 2 + 32 * 128 * 128 * 4) * 6


def test_windows_take_their_span(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "config.json").write_text(json.dumps(GEMMA))
    assert main(["size", "--model", str(model), "--memory", "24GiB"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.endswith(": 12 layers, bfloat16")
    assert lines[:2] == ["  10 × window of 1,024: 8 KV heads × 128", "  2 × full: 8 KV heads × 128"]
    rows = shown(lines[2:])
    # 65 pages: a window begins and ends inside of pages.
    assert rows["10 × window of 1,024"] == ["40 KiB", *["40.6 MiB"] * 3]
    assert rows["2 × full"] == ["8 KiB", "64 MiB", "256 MiB", "1 GiB"]
    assert rows["together"] == ["48 KiB", "104.6 MiB", "296.6 MiB", "1 GiB"]
    assert rows["at once in 24 GiB"] == ["234", "82", "23"]
    assert rows["at once, windows kept whole"] == ["64", "16", "4"]


def test_states_are_a_group(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "config.json").write_text(json.dumps(QWEN))
    words = ["size", "--model", str(model), "--memory", "24GiB"]
    assert main(words) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  6 × state: conv 8192 × 4 bfloat16, recurrent 32 × 128 × 128 float32"
    rows = shown(lines[2:])
    assert rows["the states of a sequence"] == ["12.4 MiB"]
    assert rows["6 × state"] == ["–", *["12.4 MiB"] * 3]
    assert rows["2 × full"] == ["4 KiB", "32 MiB", "128 MiB", "512 MiB"]
    assert "pages in 24 GiB" not in rows
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    for name in ("kv_heads", "head_dim", "windows", "pages", "tokens", "prompts"):
        assert answer[name] is None
    state, full = answer["groups"]
    assert (state["kind"], state["layers"], state["grid"]) == ("state", [0, 1, 2, 4, 5, 6], 64)
    assert [tensor["shape"] for tensor in state["state"]] == [[8192, 4], [32, 128, 128]]
    assert state["bytes"]["8192"] == state["bytes_per_state"] == answer["bytes_per_state"] == STATE
    assert full["bytes"]["8192"] == 8192 * answer["bytes_per_token"]
    assert answer["bytes"]["8192"] == STATE + full["bytes"]["8192"]
    assert answer["sequences"]["8192"] == 24 * 2**30 // answer["bytes"]["8192"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_type": "deepseek_v3"}, "32 layers × a latent of 512 + 64, b"),
        ({"model_type": "mistral", "sliding_window": 4096}, ": 32 layers, bfloat16"),
    ],
)
def test_what_is_special_is_said(
    model: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, object], told: str
) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA_31_8B | fields))
    assert main(["size", "--model", str(model), "--memory", "24GiB", "--tp", "8"]) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert told in title
    assert title.endswith(", one of 8 ranks")


def test_the_model_that_ships_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--memory", "1GiB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    geometry = KVGeometry.from_config(bundled_model())
    assert answer["bytes_per_token"] == geometry.bytes_per_token


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "24G"], "'24G' is no amount of memory: G has two meanings; write 24GiB"),
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


def test_what_was_assumed_is_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}, "quant_method": "x"}
    lacking = {**LLAMA_31_8B, "torch_dtype": None, "quantization_config": scheme}
    (model / "config.json").write_text(json.dumps(lacking))
    words = ["size", "--model", str(model), "--memory", "24GiB"]
    assert main(words) == 0
    title, assumed, asked, *_ = capsys.readouterr().out.splitlines()
    assert title.endswith("× 128, bfloat16")
    assert assumed.endswith("no dtype and no weights are beside it; bfloat16 is assumed")
    assert "the checkpoint asks for a KV cache of 8-bit float (kv_cache_scheme)" in asked
    assert main([*words, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [note in line for note, line in zip(notes, (assumed, asked), strict=True)] == [True] * 2
    assert main([*words, "--dtype", "fp8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_it_needs_neither_torch_nor_transformers(model: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; from kvkeep.cli import main\n"
        f"main(['size', '--model', {str(model)!r}, '--memory', '24GiB'])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
