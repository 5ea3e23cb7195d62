"""Single files of versions that are not written yet, with unknown fields, cut short, or changed.

As in `test_other_versions.py`, each is refused by name, or what cannot be read is counted.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_every_format import NEWEST

from kvkeep import InvalidValue
from kvkeep.bench.traces import open_trace
from kvkeep.cli import main
from kvkeep.cli.config_file import ConfigFile
from kvkeep.core.cost import CostModel
from kvkeep.core.public import read_prefixes
from kvkeep.serve.kv_events.wire import decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_trace_of_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    text = (NEWEST / "trace.jsonl").read_text()
    path.write_text(text.replace('"kvkeep_trace":1', '"kvkeep_trace":2'))
    with pytest.raises(InvalidValue, match="kvkeep_trace is 2, not 1"):
        open_trace(path)
    assert main(["replay", str(path), "--capacity", "64"]) == 2
    assert "kvkeep_trace is 2, not 1" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["0", "10", "1.0", "true", "null", '"1"', "[1]", "1e400"])
def test_a_trace_of_another_version_is_none_of_another_format(tmp_path: Path, version: str) -> None:
    """Its lines may look like those of a format that is read."""
    line = '{"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [0]}\n'
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"kvkeep_trace": {version}, "unit_tokens": 512}}\n{line}')
    with pytest.raises(InvalidValue, match=r"t\.jsonl is no .* line 1: kvkeep_trace is .* not 1"):
        open_trace(path)


def test_nothing_is_read_behind_a_header_of_another_version(tmp_path: Path) -> None:
    """Of files that were joined, until the next header that fits."""
    text = (NEWEST / "trace.jsonl").read_text()
    count = len(text.splitlines()) - 1
    path = tmp_path / "t.jsonl"
    for field, other in (('"kvkeep_trace":1', '"kvkeep_trace":2'), ('_tokens":4}', '_tokens":8}')):
        assert field in text
        path.write_text(text + text.replace(field, other, 1) + text)
        trace = open_trace(path)
        assert len(list(trace)) == 2 * count
        assert trace.skipped == 1 + count


def test_unknown_fields_of_a_trace_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = (NEWEST / "trace.jsonl").read_text().replace("}\n", ',"a_new_field":[1]}\n')
    path.write_text(lines)
    whole = list(open_trace(NEWEST / "trace.jsonl"))
    assert [request.units.tolist() for request in open_trace(path)] == [
        request.units.tolist() for request in whole
    ]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_cut_short_gives_its_beginning(tmp_path: Path, name: str) -> None:
    whole = (NEWEST / name).read_bytes()
    want = [(one.time, one.units.tolist()) for one in open_trace(NEWEST / name)]
    path = tmp_path / name
    for size in range(0, len(whole), 61):
        path.write_bytes(whole[:size])
        try:
            trace = open_trace(path)
            found = [(one.time, one.units.tolist()) for one in trace]
        except InvalidValue:
            continue
        assert found == want[: len(found)]
        if name.endswith("gz"):
            assert trace.skipped == 1
        else:
            assert len(found) + trace.skipped == len(whole[:size].splitlines()) - 1


def test_costs_of_another_version_or_cut_short(tmp_path: Path) -> None:
    for name in ("cost.json", "reads.json", "prefill.json"):
        text = (NEWEST / name).read_text()
        path = tmp_path / name
        path.write_text(text.replace('"kvkeep_cost": 1', '"kvkeep_cost": 2'))
        with pytest.raises(InvalidValue, match=rf"{name}: kvkeep_cost is 2; 1 is needed"):
            CostModel.read(path)
        path.write_text(text.replace("{", '{"a_new_field": 1,', 1))
        assert CostModel.read(path).as_dict() == CostModel.read(NEWEST / name).as_dict()
        for size in range(0, len(text.rstrip()), 5):
            path.write_text(text[:size])
            with pytest.raises(InvalidValue, match=name):
                CostModel.read(path)


def test_events_that_are_not_known_are_counted() -> None:
    payload = (NEWEST / "events.bin").read_bytes()
    whole, _ = decode(payload)
    ts, events, rank = msgspec.msgpack.decode(payload)
    events[1] = {"type": "BlockMoved", "block_hashes": [1]}
    events[0]["a_new_field"] = 1
    batch, skipped = decode(msgspec.msgpack.encode([ts, events, rank]))
    assert skipped == 1
    assert batch.events == [whole.events[0], *whole.events[2:]]
    for size in range(len(payload)):
        with pytest.raises(InvalidValue, match="not a batch of KV events"):
            decode(payload[:size])


def test_settings_that_are_not_known_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.toml"
    text = (NEWEST / "settings.toml").read_text()
    path.write_text(text.replace("port = 8000", "port = 8000\na-new-option = 1"))
    assert main(["config", "check", str(path)]) != 0
    said = "".join(capsys.readouterr())
    assert "a-new-option" in said
    assert "Traceback" not in said


# --- bytes that nobody wrote -----------------------------------------------------------------

FILES: dict[str, Callable[[Path], object]] = {
    "trace.jsonl": lambda path: list(open_trace(path)),
    "trace.jsonl.gz": lambda path: list(open_trace(path)),
    "cost.json": CostModel.read,
    "prefill.json": CostModel.read,
    "settings.toml": ConfigFile.read,
    "prefixes.jsonl": lambda path: read_prefixes(path, None),
    "events.bin": lambda path: decode(path.read_bytes()),
}


@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_was_changed_is_read_or_refused(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    """No reader raises anything but `InvalidValue`."""
    whole = bytearray((NEWEST / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        kind = data.draw(st.sampled_from(["byte", "cut", "twice"]))
        if kind == "byte":
            whole[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del whole[at : at + data.draw(st.integers(1, 20))]
        else:
            whole[at:at] = whole[at : at + data.draw(st.integers(1, 20))]
        if not whole:
            break
    path = tmp_path / name
    path.write_bytes(whole)
    with suppress(InvalidValue):
        FILES[name](path)
