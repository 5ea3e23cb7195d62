"""The output of ``kvkeep explain``, as lines of `rich` without markup."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from kvkeep.cli.client import below, cause_words, entries, number, short_id, text, tokens_by, whole
from kvkeep.cli.drawing import ago, amount, clock, percent, plural, seconds, visible
from kvkeep.cli.lines import REUSE, bar, cell, hanging, reuse_bar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Object = Mapping[str, Any]

__all__ = ["explanation", "summary"]

_WIDEST: Final = 120  # columns; a longer bar shows no more
_SHOWN_CAUSES: Final = 12
_SHOWN_IDS: Final = 16
_NAMES: Final = ("this prompt", "cached")
_WORDS: Final = {
    "diverged": "differs",
    "not_admitted": "not stored",
    "not_loaded": "faster to compute",
    "page_remainder": "rest of a page",
    "not_resumable": "no state there",
}


# --- the summary ----------------------------------------------------------------------------------


def summary(said: Object, width: int) -> list[Text]:
    """Draw the causes of the tokens computed for the latest requests, in the server's order."""
    width = min(width, _WIDEST)
    reused, computed = tokens_by(said, "reused"), tokens_by(said, "computed")
    prompt, missed = whole(said, "prompt_tokens"), sum(computed.values())
    if not whole(said, "requests"):
        return [Text("the server has recorded no request yet")]
    line = Text()
    line.append(f"the last {plural(whole(said, 'requests'), 'request')}", "bold")
    line.append(f": {prompt:,} prompt tokens, {percent(sum(reused.values()), prompt)} reused")
    if reused:
        parts = (f"{percent(tokens, prompt)} {_source(name)}" for name, tokens in reused.items())
        line.append(f" ({', '.join(parts)})", "dim")
    lines = [line, reuse_bar(reused, missed, width), _legend(reused, missed), Text()]
    causes = entries(said, "causes")
    if not causes:
        return [*lines, Text("no computed token could have been reused")]
    lines.append(Text(f"causes of the {missed:,} computed tokens", "bold"))
    lines.append(Text("share   tokens  requests", "dim"))
    for cause in causes[:_SHOWN_CAUSES]:
        share = percent(number(cause, "share") or 0.0, 1.0)
        line = Text(f"{share:>5}  {amount(whole(cause, 'tokens')):>7}  ")
        line.append(f"{amount(whole(cause, 'requests')):>8}  ")
        example, indent = short_id(text(cause, "example")), line.cell_len
        lines += hanging(line, cause_words(cause) + (f" [{example}]" if example else ""), width)
        if advice := text(cause, "advice"):
            lines += hanging(Text(" " * indent), advice, width, "dim")
        if both := _both(below(cause, "text"), width):
            hourly = amount(whole(cause, "tokens_per_hour"))
            lines.append(Text(f"{'':{indent}}costs {hourly} tokens an hour, by this text:", "dim"))
            lines += both
    if rest := causes[_SHOWN_CAUSES:]:
        share = percent(sum(number(cause, "share") or 0.0 for cause in rest), 1.0)
        tokens = amount(sum(whole(cause, "tokens") for cause in rest))
        lines.append(Text(f"{share:>5}  {tokens:>7}  {'':8}  {plural(len(rest), 'more cause')}"))
    lines.append(Text())
    lines.append(Text("in brackets: an example request, for kvkeep explain URL ID", "dim"))
    return lines


def _source(name: str) -> str:
    return "from the pool" if name == "pool" else f"from {name}"


def _legend(reused: Mapping[str, int], computed: int) -> Text:
    pool = reused.get("pool", 0)
    counts = {"reused": pool, "loaded": sum(reused.values()) - pool, "computed": computed}
    line = Text()
    for name, (glyph, style) in REUSE.items():
        line.append(f"{glyph} ", style).append(f"{counts[name]:,} {name}   ")
    return line


# --- one explanation ------------------------------------------------------------------------------


def explanation(said: Object, width: int) -> list[Text]:
    """Draw one prompt: reused and computed spans, reasons, and the first difference."""
    width = min(width, _WIDEST)
    prompt = whole(said, "prompt_tokens")
    reused, computed = tokens_by(said, "reused"), tokens_by(said, "computed")
    spans = entries(said, "spans")
    lines = [*_who(said, width), *hanging(Text(), text(said, "sentence"), width, "bold"), Text()]
    lines += [_spans_bar(spans, width), _legend(reused, sum(computed.values())), Text()]
    digits = len(f"{prompt:,}")
    for span in spans:
        lines += _span(span, digits, width)
    difference = _difference(said, spans, width)
    return [*lines, *([Text(), *difference] if difference else [])]


def _who(said: Object, width: int) -> list[Text]:
    name = text(said, "id") or "this prompt, if it were sent now"
    parts = [text(said, "endpoint")]
    if salt := text(said, "cache_salt"):
        parts.append(f"cache_salt {salt}")
    if session := text(said, "session"):
        parts.append(f"session {session}")
    if text(said, "id"):
        at = number(said, "at") or 0.0
        parts.append(f"{clock(at)}, {ago(time.time() - at)} ago")
        parts.append(text(said, "outcome") or "running")
        if (ttft := number(said, "ttft_s")) is not None:
            parts.append(f"first token after {seconds(ttft)}")
        if answered := whole(said, "generated_tokens"):
            parts.append(
                f"{plural(answered, 'token')} answered in {seconds(number(said, 'seconds'))}"
            )
    parts.append(plural(whole(said, "prompt_tokens"), "prompt token"))
    return hanging(Text(f"{name}  ", "bold"), " · ".join(filter(None, parts)), width, "dim", 2)


def _spans_bar(spans: Sequence[Object], width: int) -> Text:
    """Draw the spans of a prompt as one bar."""
    return bar([(whole(s, "stop") - whole(s, "start"), *REUSE[_kind(s)]) for s in spans], width)


def _kind(span: Object) -> str:
    source = span.get("source")
    return "computed" if source is None else "reused" if source == "pool" else "loaded"


def _span(span: Object, digits: int, width: int) -> list[Text]:
    start, stop = whole(span, "start"), whole(span, "stop")
    kind = _kind(span)
    line = Text(f"{start:>{digits},} … {stop:>{digits},}  {stop - start:>{digits},}  ")
    line.append(f"{REUSE[kind][0]} ", REUSE[kind][1])
    if kind != "computed":
        line.append(f"reused {_source(text(span, 'source'))}")
        public = below(span, "evidence").get("public") is True
        return [line.append(", public prefix: shared by all tenants") if public else line]
    words = text(span, "reason", "?").replace("_", " ")
    words = _WORDS.get(text(span, "reason"), words)
    return hanging(line, f"{words}: {why}" if (why := text(span, "why")) else words, width)


# --- the first difference ------------------------------------------------------------------------


def _difference(said: Object, spans: Sequence[Object], width: int) -> list[Text]:
    """Draw both texts around the first different token, one below the other, with a mark."""
    if both := _both(below(said, "text"), width):
        return [Text("the first difference", "bold"), *both]
    for span in spans:
        of = below(span, "evidence")
        if text(span, "reason") == "diverged" and isinstance(of.get("given"), list):
            lines = [Text(f"token ids around {whole(of, 'position'):,}", "bold")]
            for name, which in zip(_NAMES, ("given", "cached"), strict=True):
                ids = of.get(which)
                listed = (
                    [str(one) for one in ids if type(one) is int] if isinstance(ids, list) else []
                )
                lines.append(Text(f"{name:>12}  {' '.join(listed[:_SHOWN_IDS])}"))
            return lines
    return []


def _both(shown: Object, width: int) -> list[Text]:
    """Draw both texts of a difference, each marked; none if there are none."""
    if not shown:
        return []
    both = []
    for name, which in zip(_NAMES, ("given", "cached"), strict=True):
        raw, at = shown.get(f"{which}_text"), whole(shown, f"at_{which}")
        both.append(_marked(name, raw if isinstance(raw, str) else "", at, width - 14))
    (given, mark), (cached, other) = both
    marks = [mark] if mark.plain != other.plain else []  # one mark is enough at the same column
    return [given, *marks, cached, other]


def _marked(name: str, raw: str, at: int, room: int) -> tuple[Text, Text]:
    """Draw a text on one line, cut to ``room`` columns, and a mark below character ``at``."""
    before, after = visible(raw[:at]), visible(raw[at:])
    head = cell(before, Text(before).cell_len)
    keep = room // 2
    if head.cell_len > keep:
        cut = Text(before)
        while cut.cell_len > keep - 1:
            cut = cut[max(1, (cut.cell_len - keep + 1) // 2) :]
        before = f"…{cut.plain}"
    start = Text(before).cell_len
    line = Text(f"{name:>12}  ", "dim")
    line.append(before).append_text(cell(after, max(room - start, 1), "bold yellow"))
    return line, Text(" " * (14 + start) + "^", "bold yellow")
