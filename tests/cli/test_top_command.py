"""``kvkeep top``: what it draws, and in a real pseudo-terminal how it begins, goes on and ends."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from said_live import live, request, summary
from told_server import failure, told

import warm
from kvkeep.cli import main
from kvkeep.cli.client import entries
from kvkeep.cli.top import Picture
from kvkeep.cli.top_view import draw
from warm import KVKEEP

AT = 1_790_000_000.0
# What rich sends to draw: colours, the cursor, the other screen. All else would be somebody else's.
DRAWN = re.compile(r"\x1b\[(?:[0-9;]*[mHKJA]|\?(?:25|1049)[hl])")
EVIL = "\x1b]52;c;aGk=\x07 \x1b[2J\x9b31m \u202eevil\u2066 [red]x[/red] :smile: \ud800 \r\n\x00"


def answers(**changed):
    asked = [request(back, at=AT - back) for back in range(30)]
    return {
        "/kv/live": live(**changed), "/kv/requests": {"requests": asked}, "/kv/summary": summary()
    }  # fmt: skip


def picture(**changed):
    known = {
        "live": live(), "before": None, "requests": [request(back) for back in range(30)],
        "summary": summary(), "seen_at": AT,
    }  # fmt: skip
    return Picture(**{**known, **changed})


def plain(lines):
    return [line.plain for line in lines]


# --- the picture ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 119, 120, 139, 140, 160, 240])
@pytest.mark.parametrize("height", [24, 36, 50])
def test_a_picture_is_exactly_as_large_as_the_terminal(width, height):
    lines = draw(picture(), "http://localhost:8000", width, height, ends="Ctrl-C ends")
    assert [line.cell_len for line in lines] == [width] * len(lines)
    assert len(lines) == height
    assert "Ctrl-C ends" in lines[-1].plain
    shown = "\n".join(plain(lines))
    for word in (
        "kvkeep-tiny", "3 running", "64 % so far", "10.8× sooner", "300 in use", "memory",
        "412 MiB of 1 GiB", "open", "acme", "differ at token 41", "░ computed",
    ):  # fmt: skip
        assert word in shown


def test_a_terminal_that_is_far_too_small_is_no_trouble():
    for width in (1, 2, 7, 20, 40, 79):
        for height in (1, 2, 3, 7, 12, 40):
            lines = draw(picture(), "http://here", width, height, ends="Ctrl-C ends")
            assert [line.cell_len for line in lines] == [width] * height


def test_traffic_is_what_moved_since_the_picture_before():
    before = live(at=AT - 2)
    now = live()
    now["tiers"][0] = {**now["tiers"][0], "read_bytes": 90_000_000 + (2 << 20)}
    head, tier = plain(draw(picture(live=now, before=before), "x", 80, 24))[5:7]
    assert ("read/s" in head, "write/s" in head) == (True, True)
    assert tier.split()[-4:] == ["MiB", "0", "B", "ok"]
    assert " 1 MiB " in tier
    head, tier = plain(draw(picture(), "x", 80, 24))[5:7]
    assert ("read " in head, "written" in head) == (True, True)
    assert "86 MiB   412 MiB" in tier


def test_a_fill_that_is_unknown_is_not_drawn_as_empty():
    now = live()
    now["tiers"][0] = {**now["tiers"][0], "used_bytes": None, "capacity": None}
    tier = plain(draw(picture(live=now), "x", 80, 24))[6]
    assert "0 B" not in tier
    assert " – " in tier


def test_what_is_missing_is_drawn_as_missing():
    for height in (1, 5, 9, 24, 50):
        lines = draw(Picture({}, None, [], {}, AT), "x", 80, height)
        assert all(line.cell_len == 80 for line in lines)
        assert len(lines) <= height


def test_a_server_that_is_gone_is_said_to_be():
    lines = draw(picture(trouble="no server listens\x1b[2J", seen_at=time.time()), "x", 80, 24)
    assert "last seen 0 s ago, retrying: no server listens␛[2J" in lines[0].plain
    assert "64 % so far" in "\n".join(plain(lines)), "what was known stays"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([EVIL, 10**400, -1, float("nan"), "世界" * 20]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@st.composite
def mangled(draw_, whole_):
    """What a server says, with some of it replaced by anything."""
    if draw_(st.integers(0, 5)) == 0:
        return draw_(anything)
    if isinstance(whole_, dict):
        return {name: draw_(mangled(value)) for name, value in whole_.items()}
    if isinstance(whole_, list):
        return [draw_(mangled(value)) for value in whole_[:3]]
    return whole_


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_answer_breaks_the_picture_or_gets_out_of_it(data):
    said = data.draw(mangled(live()))
    requests = data.draw(mangled([request(), request(1)]))
    summed = data.draw(mangled(summary()))
    known = {
        "live": said if isinstance(said, dict) else {},
        "before": data.draw(
            st.sampled_from([None, live(), said if isinstance(said, dict) else {}])
        ),
        "requests": entries({"requests": requests}, "requests"),
        "summary": summed if isinstance(summed, dict) else {},
    }
    width, height = data.draw(st.sampled_from([(80, 24), (160, 50)]))
    for line in draw(picture(**known), "x", width, height):
        assert line.cell_len == width
        assert line.plain.isprintable()


# --- printed --------------------------------------------------------------------------------------


def test_one_picture_is_printed_where_there_is_no_terminal(capsys):
    with told(answers()) as server:
        assert main(["top", server.url]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    assert "\x1b" not in out
    assert out.startswith(" kvkeep-tiny ")
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("diverged") > 10


def test_json_is_an_object_a_line(capsys):
    with told(answers()) as server:
        assert main(["top", server.url, "--once", "--json", "--last", "7"]) == 0
        assert "/kv/requests?last=7" in server.paths()
    said = json.loads(capsys.readouterr().out)
    assert said["live"]["model"] == "kvkeep-tiny"
    assert (len(said["requests"]), said["summary"]["requests"]) == (30, 212)


def test_json_goes_on_while_the_server_is_gone():
    command = [*KVKEEP, "top", "--json", "--interval", "0.1"]
    with told(answers()) as server:
        url, port = server.url, server.server_address[1]
        process = warm.Popen([*command, url], stdout=subprocess.PIPE, text=True)
        assert "live" in json.loads(process.stdout.readline())
    try:
        while "error" not in (said := json.loads(process.stdout.readline())):
            pass
        assert "no server listens" in said["error"] or "closed" in said["error"]
        with told(answers(), port):
            while "live" not in json.loads(process.stdout.readline()):
                pass
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.stdout.close()
        process.wait(30)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["127.0.0.1:1"], "no server listens at http://127.0.0.1:1"),
        (["127.0.0.1:1", "--interval", "0"], "--interval is 0"),
        (["127.0.0.1:1", "--interval", "nan"], "--interval is nan"),
        (["127.0.0.1:1", "--last", "0"], "--last is 0"),
    ],
)
def test_mistakes_are_one_line(arguments, words, capsys):
    assert main(["top", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_another_server_is_one_line_too(capsys):
    with told({}) as server:
        assert main(["top", server.url]) == 2
    assert "says: there is nothing at this address" in capsys.readouterr().err


# --- in a terminal --------------------------------------------------------------------------------

posix = pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")


@contextmanager
def terminal(url, *arguments, columns=80, rows=24):
    """``kvkeep top`` in a pseudo-terminal: what it wrote, keys for it, and the process."""
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()

    def resize(columns, rows):
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    resize(columns, rows)
    before = termios.tcgetattr(theirs)
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = warm.Popen(
        [*KVKEEP, "top", url, "--interval", "0.1", *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
    )  # fmt: skip
    written = []

    def read(until="", since=0, seconds=30.0):
        """All that was written, once ``until`` is in what came after the first ``since`` bytes."""
        end = time.monotonic() + seconds
        while True:
            text = b"".join(written).decode(errors="ignore")
            if until and until in text[since:]:
                return text
            assert time.monotonic() < end, f"no {until!r} in {text[since:]!r}"
            if select.select([ours], [], [], 0.05)[0]:
                written.append(os.read(ours, 65536))
            elif not until or process.poll() is not None:
                assert not until, f"it ended without {until!r}: {text[since:]!r}"
                return text

    def wait(seconds=30.0):
        """Its exit code; it is read meanwhile, as it cannot end while the terminal is full."""
        end = time.monotonic() + seconds
        while process.poll() is None:
            assert time.monotonic() < end, "it does not end"
            if select.select([ours], [], [], 0.05)[0]:
                written.append(os.read(ours, 65536))
        return process.returncode

    def unchanged():
        return termios.tcgetattr(theirs) == before

    try:
        yield SimpleNamespace(
            process=process, read=read, wait=wait, resize=resize, unchanged=unchanged,
            press=lambda keys: os.write(ours, keys),
        )  # fmt: skip
    finally:
        process.kill()
        process.wait(30)
        os.close(ours)
        os.close(theirs)


def assert_given_back(top, code):
    assert top.wait() == code
    text = top.read()
    assert text.rindex("\x1b[?1049l") > text.rindex("\x1b[?1049h"), "the other screen is left"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown"
    assert top.unchanged()
    assert "Traceback" not in text


@posix
@pytest.mark.parametrize(
    ("end", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_the_terminal_is_given_back_as_it_was(end, code):
    with told(answers()) as server, terminal(server.url) as top:
        top.read("Ctrl-C ends")
        top.process.send_signal(end)
        assert_given_back(top, code)


@posix
def test_it_follows_the_server_and_the_size_of_the_terminal():
    said = answers()
    with told(said) as server, terminal(server.url) as top:
        top.read("3 running")
        said["/kv/live"] = live(running=17)
        since = len(top.read("17 running"))
        top.resize(160, 50)
        top.read("queued", since)  # there is room for it now
        top.process.send_signal(signal.SIGINT)
        assert_given_back(top, 130)


@posix
def test_a_server_that_goes_away_is_waited_for():
    with told(answers()) as server:
        port = server.server_address[1]
        with terminal(server.url, columns=120) as top:
            top.read("3 running")
            server.shutdown()
            server.server_close()
            for connection in server.connected:
                connection.shutdown(2)
            since = len(top.read("retrying"))
            with told(answers(running=9), port):
                top.read("9 running", since)
            top.process.send_signal(signal.SIGINT)
            assert_given_back(top, 130)


@posix
def test_what_no_asking_again_mends_ends_it_with_one_line():
    said = answers()
    with told(said) as server, terminal(server.url) as top:
        top.read("3 running")
        said["/kv/live"] = (401, failure("no"))
        top.read("kvkeep: error: ")
        assert_given_back(top, 2)
        assert "needs an API key" in top.read()


@posix
def test_nothing_that_a_client_sends_reaches_the_terminal_as_more_than_text():
    said = {
        "/kv/live": live(
            model=EVIL, policy=EVIL, version=EVIL,
            tenants=[{"cache_salt": EVIL, "requests": 3}],
            tiers=[{**live()["tiers"][0], "name": EVIL, "place": EVIL, "breaker": EVIL}],
        ),
        "/kv/requests": {"requests": [request(id=EVIL, cache_salt=EVIL, sentence=EVIL,
                                              computed={EVIL: 7})]},
        "/kv/summary": summary(causes=[{"sentence": EVIL, "tokens": 4, "reason": EVIL}]),
    }  # fmt: skip
    for columns, rows in ((80, 24), (160, 50)):
        with told(said) as server, terminal(server.url, columns=columns, rows=rows) as top:
            top.read("Ctrl-C ends")
            top.process.send_signal(signal.SIGINT)
            assert_given_back(top, 130)
            text = top.read()
        assert "␛]52;c" in text
        assert "[red]x[/red] :smile:" in text
        left = DRAWN.sub("", text)
        assert (
            re.findall(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", left)
            == []
        )
