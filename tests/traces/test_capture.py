"""A capture by itself: what is dropped and said so, ids that cannot be guessed, its end."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvkeep.bench.traces import Capture, Seen, Served, open_trace
from kvkeep.bench.traces.capture import KeyedIds
from kvkeep.bench.traces.chain import chain_tokens
from kvkeep.core.errors import InvalidValue
from kvkeep.core.keys import Namespace

if TYPE_CHECKING:
    from pathlib import Path


def seen(*tokens: int, answer: tuple[int, ...] = (), tenant: str = "", **more: object) -> Seen:
    prompt = np.array(tokens, np.int32)
    return Seen(
        arrived=perf_counter(), prompt=prompt, answer=answer, namespace=Namespace(tenant), **more
    )  # type: ignore[arg-type]


def captured(path: Path, *given: Seen, unit: int = 4) -> list[object]:
    capture = Capture(path, name="t", page_size=4, pages=9, unit_tokens=unit)
    for one in given:
        capture.note(one)
    assert capture.close()
    assert capture.stats().dropped == 0
    return list(open_trace(path))


def test_ids_share_what_prompts_share(tmp_path: Path) -> None:
    one, other, third = captured(
        tmp_path / "t",
        seen(*range(10), answer=(50, 51, 52, 53, 54, 55, 56)),
        seen(*range(10), 50, 51, 52, 53, 54, 55, 99, tenant="b"),
        seen(*range(8), store=False, served=Served(4), stop="length"),
    )
    assert len(one.units) == 3
    # The prompt and all of the answer but its last token: what the next turn finds.
    assert [*one.units[:2], *one.answer] == other.units[:4].tolist()
    assert len(one.answer) == 2
    assert third.units.tolist() == one.units[:2].tolist()
    assert (third.store, third.served, one.served) == (False, Served(4), None)
    assert (third.stop, one.stop) == ("length", "")
    assert one.namespace == third.namespace != other.namespace


def test_an_answer_of_one_token_leaves_nothing(tmp_path: Path) -> None:
    one, none = captured(tmp_path / "t", seen(1, 2, 3, answer=(4,)), seen(1, 2, 3))
    assert one.answer.tolist() == none.answer.tolist() == []
    assert (one.output_tokens, none.output_tokens) == (1, 0)


@pytest.mark.parametrize("unit", [1, 3, 16])
def test_units_have_the_size_that_was_asked_for(unit: int, tmp_path: Path) -> None:
    (one,) = captured(tmp_path / "t", seen(*range(20)), unit=unit)
    assert len(one.units) == -(-20 // unit)
    assert len(set(one.units.tolist())) == len(one.units)


def test_ids_are_prefix_chained_and_of_this_file_alone() -> None:
    keyed, other = KeyedIds(), KeyedIds()
    one, same = np.array([1, 2, 3, 4], np.int32), np.array([9, 2, 3, 4], np.int32)
    ids = keyed.units(one, 2)
    assert ids.tolist() == keyed.units(one, 2).tolist()
    assert not set(ids.tolist()) & set(keyed.units(same, 2).tolist())
    assert not set(ids.tolist()) & set(other.units(one, 2).tolist())
    assert not set(ids.tolist()) & set(chain_tokens(one, 2).tolist())
    assert ids.min() >= 0
    assert (
        keyed.name("session", b"x")
        != keyed.name("namespace", b"x")
        != other.name("namespace", b"x")
    )


def test_what_finds_no_room_is_dropped_and_the_file_says_so(tmp_path: Path) -> None:
    capture = Capture(tmp_path / "t", name="t", page_size=16, pages=1, queue_bytes=5000)
    held = threading.Event()
    write = capture._writer.write
    capture._writer.write = lambda request: (held.wait(30), write(request))  # a slow disk
    given = [seen(*range(200)) for _ in range(20)]
    begun = perf_counter()
    for one in given:
        capture.note(one)
    assert perf_counter() - begun < 20  # it did not wait for the disk
    capture.note(seen(*range(5000)))  # larger than all the room there is
    held.set()
    assert capture.close()
    stats = capture.stats()
    assert stats.dropped >= 15
    assert stats.written + stats.dropped == 21
    trace = open_trace(tmp_path / "t")
    assert len(list(trace)) == stats.written
    assert trace.dropped == stats.dropped


def test_what_comes_after_the_end_is_dropped(tmp_path: Path) -> None:
    capture = Capture(tmp_path / "t", name="t", page_size=16, pages=1)
    assert capture.close()
    assert capture.close()
    capture.note(seen(1))
    assert (capture.stats().written, capture.stats().dropped) == (0, 1)
    assert list(open_trace(tmp_path / "t")) == []


@pytest.mark.parametrize("name", ["t", "t.gz", "t.zst"])
def test_the_file_can_be_read_while_it_grows(tmp_path: Path, name: str) -> None:
    capture = Capture(tmp_path / name, name="t", page_size=16, pages=1)
    try:
        capture.note(seen(1, 2, 3))
        for _ in range(1000):
            try:
                if len(list(open_trace(tmp_path / name))) == 1:
                    break
            except InvalidValue:  # not even the header yet
                pass
            threading.Event().wait(0.01)
        else:
            pytest.fail("nothing came")
    finally:
        assert capture.close()


def test_many_threads_note_each_once(tmp_path: Path) -> None:
    capture = Capture(tmp_path / "t", name="t", page_size=16, pages=1)

    def note(number: int) -> None:
        for turn in range(50):
            capture.note(seen(number, turn))

    threads = [threading.Thread(target=note, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capture.close()
    read = list(open_trace(tmp_path / "t"))
    assert len(read) == len({one.units[0] for one in read}) == 300


def test_a_capture_does_not_write_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("precious")
    with pytest.raises(InvalidValue, match="exists already"):
        Capture(tmp_path / "t", name="t", page_size=16, pages=1)
    with pytest.raises(InvalidValue, match="unit_tokens"):
        Capture(tmp_path / "u", name="t", page_size=16, pages=1, unit_tokens=-1)
    assert not (tmp_path / "u").exists()
