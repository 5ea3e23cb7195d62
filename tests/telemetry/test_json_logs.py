"""Logs for machines: one object a line, whatever is in it, without secrets."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.observe.telemetry.logs import JSONLines, Plain, configure, redact


@pytest.fixture
def written():
    """A logger of its own, and what it wrote as JSON and as text."""
    logger = logging.Logger("kvkeep.test")
    streams = []
    for formatter in (JSONLines(), Plain()):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        logger.addHandler(handler)
        streams.append(stream)
    return logger, *streams


def objects(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_an_object(written):
    logger, lines, text = written
    logger.warning("took %d pages", 5, extra={"pages": 5, "tier": "file", "ratio": 0.5})
    (told,) = objects(lines)
    assert told.pop("time").endswith("Z")
    assert told == {
        "level": "warning", "logger": "kvkeep.test", "message": "took 5 pages",
        "pages": 5, "tier": "file", "ratio": 0.5,
    }  # fmt: skip
    assert text.getvalue().endswith(" WARNING took 5 pages\n")


def test_time_is_utc_with_milliseconds():
    record = logging.makeLogRecord({"created": 1_700_000_000.9996, "msg": "x"})
    assert json.loads(JSONLines().format(record))["time"] == "2023-11-14T22:13:20.999Z"


HOSTILE = 'a\nb\r\n{"level": "critical"}\x1b[2J\u2028\u202e\x00\ud800 "quoted" \\'


def test_hostile_text_stays_in_its_line(written):
    logger, lines, text = written
    logger.info("prompt %s", HOSTILE, extra={"who": HOSTILE, HOSTILE: 1})
    assert lines.getvalue().count("\n") == text.getvalue().count("\n") == 1
    assert lines.getvalue().isascii()
    assert not {"\x1b", "\x00", "\u202e"} & set(lines.getvalue() + text.getvalue())
    (told,) = objects(lines)
    assert told["message"] == f"prompt {HOSTILE}"
    assert told["who"] == HOSTILE
    text.getvalue().encode()


def test_an_exception_is_in_the_same_line(written):
    logger, lines, text = written
    try:
        raise ValueError(f"bad {HOSTILE} redis://:hunter22@host")
    except ValueError:
        logger.exception("it failed", stack_info=True)
    (told,) = objects(lines)
    assert told["error"].startswith("Traceback")
    assert "ValueError: bad a\nb" in told["error"]
    assert "test_json_logs" in told["stack"]
    assert "hunter22" not in lines.getvalue() + text.getvalue()
    assert "\x1b" not in text.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer s3cr3t-value",
        "authorization: basic s3cr3t-value",
        "{'Authorization': 'Bearer s3cr3t-value'}",
        '"x-api-key": "s3cr3t-value"',
        "api_key=s3cr3t-value",
        "sent bearer s3cr3t-value to it",
        "valkey://user:s3cr3t-value@host:6379/0",
        "redis://:s3cr3t-value@host",
        "https://user:s3cr3t-v@lue@host/path",
        "s3://bucket?access_key=s3cr3t-value&region=x",
        "s3://bucket?region=x&secret_access_key=s3cr3t-value",
        "https://host/x?X-Amz-Signature=s3cr3t-value&a=b",
        "file:///x?password=s3cr3t-value",
    ],
)
def test_secrets_are_taken_out(written, text):
    logger, lines, plain = written
    logger.info("%s", text, extra={"place": text, "deep": {"list": [text]}})
    for stream in (lines, plain):
        assert "s3cr3t" not in stream.getvalue()
        assert "***" in stream.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8000/v1/chat/completions took 5 s",
        "POST /v1/completions 200 0.012 s",
        "12 tokens of 30: key 4f, tokens=12, see http://host:80/a@b",
        "the bearer of news; authorization is asked for",
        "file:///var/lib/kvkeep?size=200GiB&codec=int8",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "name",
    ["authorization", "Authorization", "api_key", "password", "client_secret", "Cookie",
     "access_token", "token"],
)  # fmt: skip
def test_fields_named_after_a_secret_are_hidden(written, name):
    logger, lines, _ = written
    logger.info("x", extra={name: "s3cr3t", "outer": {name: ["s3cr3t"]}, "tokens": 3})
    (told,) = objects(lines)
    assert told[name] == told["outer"][name] == "***"
    assert told["tokens"] == 3


def test_fields_may_be_anything(written):
    logger, lines, _ = written

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    deep = [[[[[[[1]]]]]]]
    circle: list[object] = []
    circle.append(circle)
    logger.info(
        "x",
        extra={
            "nan": float("nan"), "array": np.arange(3), "one": np.int64(3), "broken": Broken(),
            "bytes": b"\xff", "deep": deep, "circle": circle, "none": None, "time": 5,
            "level": "no", "flag": True, "huge": 10**9000, "keys": {3: {"a"}},
        },
    )  # fmt: skip
    (told,) = objects(lines)
    assert told["nan"] == "nan"
    assert told["broken"] == "<Broken: RuntimeError>"
    assert (told["level"], told["extra.level"], told["extra.time"]) == ("info", "no", 5)
    assert told["keys"] == {"3": "{'a'}"}


def test_arguments_that_do_not_fit_are_told_not_raised(written):
    logger, lines, _ = written
    logger.info("%d pages", "three")
    (told,) = objects(lines)
    assert told["message"] == "%d pages (its arguments do not fit: TypeError)"


def test_long_texts_are_cut(written):
    logger, lines, _ = written
    logger.info("x" * 1_000_000)
    assert len(lines.getvalue()) < 20_000


@given(st.text(), st.dictionaries(st.text(min_size=1), st.text() | st.floats() | st.integers()))
def test_every_line_is_json(message, fields):
    record = logging.makeLogRecord({"msg": message, "args": ()})
    for name, value in fields.items():
        if name not in vars(record):
            vars(record)[name] = value  # as logging does it
    line = JSONLines().format(record)
    assert len(line.splitlines()) == 1
    json.loads(line)


def test_a_command_configures_all_loggers():
    code = (
        "import logging; from kvkeep.observe.telemetry import configure; configure('info', 'json');"
        "logging.getLogger('a.b').info('x', extra={'n': 1}); logging.getLogger('a').debug('y')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (told,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert (told["logger"], told["n"], done.stdout) == ("a.b", 1, "")


@pytest.mark.parametrize(("level", "form"), [("info", "xml"), ("loud", "json")])
def test_what_there_is_not_is_refused(level, form):
    with pytest.raises(InvalidValue):
        configure(level, form)
