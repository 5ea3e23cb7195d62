"""Measurements of ``kvkeep calibrate``: kvkeep's own engine, or a server."""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from statistics import median
from typing import TYPE_CHECKING, Any

from kvkeep.cli.arguments import model_name
from kvkeep.cli.calibrating_tiers import measure_tiers, tier_names
from kvkeep.cli.client import Address
from kvkeep.cli.costs import model_on
from kvkeep.cli.model import load
from kvkeep.cli.progress import progress
from kvkeep.cli.server import KEY_VARIABLE
from kvkeep.cli.tiers import block_tokens
from kvkeep.core.cost import Measured
from kvkeep.core.errors import InvalidValue, reason

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from http.client import HTTPResponse

    from kvkeep.cli.calibrating_tiers import TierReadings
    from kvkeep.serve.engine import Completion

__all__ = ["LENGTHS", "Readings", "Timed", "measure_engine", "measure_server"]

LENGTHS = (64, 256, 1024, 2048, 4096)
"""Default prompt lengths, in tokens; those longer than the model takes are left out."""

_TIMEOUT_S = 600.0
_MOST_BYTES = 1 << 20  # of a whole answer, or of one line of a stream
_MOST_LINES = 1_000_000
_SYLLABLES = tuple(first + last for first in "bdfglmnprstv" for last in "aeiou")


@dataclass(slots=True)
class Readings:
    """The measurements; times in seconds. ``remark`` is a note for the user.

    ``model`` is `model_on`'s name of the engine, "" for a server.
    """

    name: str
    prefill: list[Measured] = field(default_factory=list)
    decode_s: float = 0.0
    kv_bytes: float = 0.0
    remark: str = ""
    model: str = ""
    tiers: list[TierReadings] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Timed:
    """One request; times in seconds. ``cached_tokens`` is None if the server does not report it."""

    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int
    ttft_s: float
    seconds: float


def _starts(length: int, page: int) -> list[int]:
    """Return how much of a prompt to cache, in whole pages: nothing, half, all but the end."""
    half, most = length // 2 // page * page, (length - 1) // page * page
    return sorted({0, half, most})


def _pace(timed: Sequence[Timed]) -> float:
    """Return seconds per token after the first; 0 if no answer had two tokens."""
    paces = [
        (one.seconds - one.ttft_s) / (one.generated_tokens - 1)
        for one in timed
        if one.generated_tokens > 1
    ]
    return median(paces) if paces else 0.0


# --- the engine ----------------------------------------------------------------------------------


def measure_engine(args: argparse.Namespace, wanted: Sequence[int] | None) -> Readings:
    """Load the model and measure one prompt after the other.

    Raises `InvalidValue` for lengths that the model or the memory cannot take.
    """
    from kvkeep.serve.engine import Engine, SamplingParams  # noqa: PLC0415 - seconds, for torch

    runner, _ = load(args, dtype=args.dtype)
    lengths = wanted or [one for one in LENGTHS if one + args.decode <= runner.max_tokens]
    if not lengths or max(lengths) + args.decode > runner.max_tokens:
        raise InvalidValue(
            f"a prompt with {args.decode} tokens of its answer can have {runner.max_tokens} tokens "
            "here; use shorter --lengths or more --memory"
        )
    block = block_tokens(args, runner)
    tiers = tier_names(args.tier, runner.geometry, block)  # what is wrong is said before measuring
    cache = runner.cache()
    engine = Engine(runner, cache)
    rng = random.Random(0)  # noqa: S311 - prompts, no secrets

    def ask(prompt: list[int], tokens: int = 1) -> Completion:
        return engine.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))[0]

    readings = Readings(f"{model_name(args.model)} on {runner.device}")
    readings.kv_bytes = runner.geometry.bytes_per_token
    plan = [(start, one) for one in lengths for start in _starts(one, runner.page_size)]
    with progress("measuring", of=args.repeats * (len(plan) + 1)) as advance:
        ask([rng.randrange(runner.vocabulary) for _ in range(max(lengths))])  # warm-up
        for start, length in plan:
            done = []
            for _ in range(args.repeats):
                cache.clear()
                prompt = [rng.randrange(runner.vocabulary) for _ in range(length)]
                if start:
                    ask(prompt[:start])
                done.append(ask(prompt))
                advance()
            cached = done[0].cached_tokens
            readings.prefill.append(Measured(cached, length, median(d.ttft_s for d in done)))
        answers = []
        for _ in range(args.repeats):
            prompt = [rng.randrange(runner.vocabulary) for _ in range(lengths[len(lengths) // 2])]
            done = [ask(prompt, args.decode)]
            answers += [Timed(len(prompt), 0, len(d.tokens), d.ttft_s, d.seconds) for d in done]
            advance()
    readings.decode_s = _pace(answers)
    readings.model = model_on(runner)
    readings.tiers = measure_tiers(tiers, runner.geometry, block)
    return readings


# --- a server ------------------------------------------------------------------------------------


def measure_server(args: argparse.Namespace, wanted: Sequence[int] | None) -> Readings:
    """Measure a server with OpenAI's API, one request after the other.

    Raises `InvalidValue` for a server that cannot be reached or refuses a request.
    """
    server = _Server(args.url, args.name)
    rng = random.Random()  # noqa: S311 - prompts that the server has not seen, no secrets
    readings = Readings(f"{server.model} at {args.url}")
    with progress("measuring") as advance:
        server.ask(_words(rng, 16), 2)  # warm-up
        tokens_per_word = server.ask(_words(rng, 200), 1).prompt_tokens / 200
        reports_cached = True
        for length in wanted or LENGTHS:
            words = max(1, round(length / tokens_per_word))
            for start in _starts(words, 1) if reports_cached else [0]:
                try:
                    done = [_ask_cached(server, rng, start, words) for _ in range(args.repeats)]
                except InvalidValue as error:
                    if wanted or len(readings.prefill) < 2:
                        raise
                    readings.remark = f"It refuses prompts of {length:,} tokens: {error}"
                    break
                reports_cached = reports_cached and done[0].cached_tokens is not None
                cached = done[0].cached_tokens or 0
                seconds = median(one.ttft_s for one in done)
                if cached < done[0].prompt_tokens and (start == 0 or cached):
                    readings.prefill.append(Measured(cached, done[0].prompt_tokens, seconds))
                advance()
            if readings.remark:
                break
        readings.decode_s = _pace(
            [server.ask(_words(rng, 100), args.decode) for _ in range(args.repeats)]
        )
    if not reports_cached:
        readings.remark += (
            " It does not report cached tokens, so prompts with a cached prefix were not measured."
        )
    return readings


def _words(rng: random.Random, count: int) -> str:
    """Return random text, which the server has not cached."""
    return " ".join("".join(rng.choices(_SYLLABLES, k=2)) for _ in range(count))


def _ask_cached(server: _Server, rng: random.Random, start: int, words: int) -> Timed:
    """Send a prompt of ``words`` words, after sending its first ``start`` words."""
    text = _words(rng, words).split()
    if start:
        server.ask(" ".join(text[:start]), 1)
    return server.ask(" ".join(text), 1)


class _Server:
    """A server with OpenAI's API; each request makes its own connection."""

    def __init__(self, url: str, model: str | None) -> None:
        self._url = url
        self._address = Address.parse(url)
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        with self._request("GET", "/v1/models", None) as (response, _):
            found = self._json(response.read(_MOST_BYTES))
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise InvalidValue(f"{self._url} lists no model; give its name with --name") from error

    def ask(self, prompt: str, tokens: int) -> Timed:
        """Send a prompt and read its answer to the end. Raises `InvalidValue`."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        ttft, usage = None, None
        with self._request("POST", "/v1/completions", body) as (response, begun):
            for event in self._events(response):
                if "error" in event:
                    raise InvalidValue(f"{self._url} says: {_error_text(event['error'])}")
                usage = event.get("usage") or usage
                if ttft is None and event.get("choices"):
                    ttft = time.perf_counter() - begun
            seconds = time.perf_counter() - begun
        prompt_tokens = _count(usage, "prompt_tokens")
        if ttft is None or not prompt_tokens:
            raise InvalidValue(f"{self._url} ends an answer without a token or without its usage")
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        generated = _count(usage, "completion_tokens") or 0
        return Timed(prompt_tokens, _count(details, "cached_tokens"), generated, ttft, seconds)

    @contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[tuple[HTTPResponse, float]]:
        """Yield the response and when the request was sent, after the connection was made."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        try:
            with closing(self._address.connection(_TIMEOUT_S)) as connection:
                connection.connect()
                begun = time.perf_counter()
                sent = None if body is None else json.dumps(body)
                base = self._address.path.removesuffix("/v1")
                connection.request(method, base + path, sent, headers)
                with connection.getresponse() as response:
                    if response.status != 200:
                        said = _error_text(response.read(_MOST_BYTES).decode("utf-8", "replace"))
                        raise InvalidValue(f"{self._url} says {response.status}: {said}")
                    yield response, begun
        except (OSError, HTTPException) as error:
            raise InvalidValue(f"cannot reach {self._url}: {reason(error)}") from error

    def _events(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of server-sent events until ``[DONE]`` or the end."""
        for _ in range(_MOST_LINES):
            line = response.readline(_MOST_BYTES)
            name, _, data = line.partition(b":")
            if not line or (name == b"data" and data.strip() == b"[DONE]"):
                return
            if name == b"data":
                yield self._json(data)

    def _json(self, text: bytes) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise InvalidValue(f"{self._url} does not speak OpenAI's API: it sends no JSON objects")
        return found


def _count(found: object, key: str) -> int | None:
    """Return the count at ``key``; None if there is no valid one."""
    value = found.get(key) if isinstance(found, dict) else None
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _error_text(said: object) -> str:
    """Return the message of an error reply, at most 300 characters of it."""
    if isinstance(said, str):
        try:
            found = json.loads(said)
        except (ValueError, RecursionError):
            found = None
        said = found.get("error", said) if isinstance(found, dict) else said
    if isinstance(said, dict) and isinstance(said.get("message"), str):
        said = said["message"]
    return str(said)[:300]
