"""The output of ``kvkeep explain``, as lines of `rich` without markup."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from kvkeep.cli.drawing import ago, amount, clock, percent, plural, seconds, visible
from kvkeep.cli.lines import REUSE, bar, cell, hanging, reuse_bar
from kvkeep.cli.replies import below, cause_words, entries, number, short_id, text, tokens_by, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Object = Mapping[str, Any]

__all__ = ["explanation", "summary"]

_WIDEST: Final = 120  # columns; a longer bar shows no more
_SHOWN_CAUSES: Final = 12
_SHOWN_IDS: Final = 16
_WORDS: Final = {
    "new": "never seen before",
    "diverged": "cached, but after a difference",
    "evicted": "were cached, and evicted",
    "not_admitted": "seen before, but not stored",
    "other_namespace": "cached in another namespace",
    "page_remainder": "the rest of a page that is not shared",
    "not_resumable": "cached, but a request cannot go on behind them",
    "computing": "being computed by another request",
    "not_loaded": "stored, but faster to compute",
    "tier_unavailable": "in a tier that was unavailable",
    "damaged": "the stored blocks were damaged",
    "last_token": "the last token, whose logits are needed",
}
_WHY: Final = {
    "reuse_off": "reuse is off (--no-reuse)",
    "store_false": "the request had store: false",
    "answer": "answers are not stored",
    "unread": "answers like it are never read again",
    "admission": "the policy did not admit it",
    "queue_full": "the queue to the tier was full",
    "given_up": "the request was aborted before it was stored",
    "overtaken": "loading turned slow",
    "breaker": "its circuit breaker is open",
    "late": "it was too slow",
    "not_asked": "it was not asked, as its answers take too long",
    "error": "it failed",
}
_CAUSE: Final = {
    "pressure": "for lack of pages",
    "asked": "by request of a user",
    "cleared": "when the cache was cleared",
    "dropped": "when it was dropped",
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
    reason = text(span, "reason", "?")
    words = _WORDS.get(reason, reason.replace("_", " "))
    evidence = _evidence(reason, below(span, "evidence"), stop - start)
    return hanging(line, f"{words}: {evidence}" if evidence else words, width)


def _evidence(reason: str, of: Object, tokens: int) -> str:
    """Return the evidence for a span's reason in words; unknown fields are shown as given."""
    if reason == "new":
        return "public prefix, not cached yet" if of.get("public") is True else ""
    if reason == "diverged":
        nearest, differs = text(of, "nearest"), whole(of, "differs")
        said = f"at token {whole(of, 'position'):,}"
        said += f", {plural(differs, 'token')} long" if differs else ""
        said += f", from {nearest}" if nearest else ""
        said += ", from the public prefix" if of.get("public") is True else ""
        would = whole(of, "would_reuse")  # without the difference, in this and later spans
        return said + (f"; without it {would:,} more would be reused" if would > tokens else "")
    if reason == "evicted":
        return _evicted(of)
    if reason == "not_admitted":
        tier = text(of, "tier")
        why = _WHY.get(text(of, "why"), "the reason is not known")
        return why + (f" ({tier})" if tier else "")
    if reason == "other_namespace":
        return "; ".join(
            f"{visible(name)} is {_one(pair, 0)} here and {_one(pair, 1)} there"
            for name, pair in below(of, "fields").items()
        )
    if reason == "computing":
        return text(of, "by")
    if reason == "not_loaded":
        return _not_loaded(of)
    if reason == "tier_unavailable":
        waited = number(of, "waited_s")
        why = _WHY.get(text(of, "why"), text(of, "why"))
        return f"{text(of, 'tier')}, {why}" + (f" (waited {seconds(waited)})" if waited else "")
    if reason == "damaged":
        return f"in {text(of, 'tier')}"
    if reason == "not_resumable":
        return _unresumed(of)
    if reason == "page_remainder":
        return f"pages have {plural(whole(of, 'page_size'), 'token')}"
    return ", ".join(f"{visible(name)} {visible(str(value))[:80]}" for name, value in of.items())


def _not_loaded(of: Object) -> str:
    load_s, compute_s, tier = number(of, "load_s"), number(of, "compute_s"), text(of, "tier")
    why = _WHY["overtaken"] if text(of, "why") == "overtaken" else ""
    if load_s and compute_s and not why:
        why = f"loading would have taken {seconds(load_s)}, computing {seconds(compute_s)}"
    return ", ".join(part for part in (f"in {tier}" if tier else "", why) if part)


def _unresumed(of: Object) -> str:
    window = text(of, "group") == "window"
    said = "the window before is no longer kept" if window else "no state is stored there"
    nearest = whole(of, "nearest")
    said += f", the nearest is at {nearest:,}" if nearest else ", nor before"
    at, why = whole(of, "checkpoint"), text(of, "why")
    if why == "evicted":
        past = number(of, "ago_s")
        said += f"; the one at {at:,} was evicted" + (
            "" if past is None else f" {ago(past)} earlier"
        )
        cause = text(of, "cause")
        return said + (f", {_CAUSE[cause]}" if cause in _CAUSE else "")
    if why == "grid":
        return said + f"; states are kept at multiples of {plural(whole(of, 'grid'), 'token')}"
    if why == "no_room":
        return said + f"; there was no room beside the one at {at:,}"
    return said


def _evicted(of: Object) -> str:
    tier, policy = text(of, "tier", "pool"), text(of, "policy")
    said = "public prefix, " if of.get("public") is True else ""
    said += f"from {'the pool' if tier == 'pool' else tier}"
    if (past := number(of, "ago_s")) is not None:
        said += f" {ago(past)} earlier"
    said += f" by {policy}" if policy else ""
    said += f", {_CAUSE[text(of, 'cause')]}" if text(of, "cause") in _CAUSE else ""
    by, needed = text(of, "by"), whole(of, "needed_pages")
    if by:
        said += f": {by} needed {plural(needed, 'page')}" if needed else f": for {by}"
    return said


def _one(pair: object, at: int) -> str:
    found = pair[at] if isinstance(pair, list) and len(pair) == 2 else "?"
    return visible(repr(found) if isinstance(found, str) else str(found))[:80]


# --- the first difference ------------------------------------------------------------------------


def _difference(said: Object, spans: Sequence[Object], width: int) -> list[Text]:
    """Draw both texts around the first different token, one below the other, with a mark."""
    shown = below(said, "text")
    names = ("this prompt", "cached")
    room = width - 14
    if shown:
        both = []
        for name, which in zip(names, ("given", "cached"), strict=True):
            raw, at = shown.get(f"{which}_text"), whole(shown, f"at_{which}")
            both.append(_marked(name, raw if isinstance(raw, str) else "", at, room))
        (given, mark), (cached, other) = both
        marks = [mark] if mark.plain != other.plain else []  # one mark is enough at the same column
        return [Text("the first difference", "bold"), given, *marks, cached, other]
    for span in spans:
        of = below(span, "evidence")
        if text(span, "reason") == "diverged" and isinstance(of.get("given"), list):
            lines = [Text(f"token ids around {whole(of, 'position'):,}", "bold")]
            for name, which in zip(names, ("given", "cached"), strict=True):
                ids = of.get(which)
                listed = (
                    [str(one) for one in ids if type(one) is int] if isinstance(ids, list) else []
                )
                lines.append(Text(f"{name:>12}  {' '.join(listed[:_SHOWN_IDS])}"))
            return lines
    return []


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
