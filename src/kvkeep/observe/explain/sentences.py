"""Explanations in plain English; names that users chose are quoted and escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.observe.telemetry.labels import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvkeep.observe.explain.spans import Span

__all__ = ["cause_sentence", "sentence_of", "shown", "why_of"]

_MOST = 64
_PERCENT = 0.01
_FIELDS = {
    "tenant": "cache_salt",
    "lora": "LoRA adapter",
    "rank": "shard",
    "geometry": "KV geometry",
    "layout": "KV layout",
}
_CAUSES = {
    "pressure": "when memory was short",
    "asked": "because a user requested it",
    "cleared": "when the cache was cleared",
    "dropped": "when the request that published them gave them up",
}
_WHY_NOT = {
    "reuse_off": "the server reuses nothing",
    "store_false": "the request that computed them before was not to be stored",
    "admission": "they were seen before, but not often enough to be admitted",
    "answer": "they are an answer, and those were not to be stored",
    "unread": "they are an answer, and answers like it were never read again",
    "queue_full": "they were dropped on their way to be stored, because the queue was full",
    "lossy": "they are not exact, and the tier stores exact KV only",
    "given_up": "the request that computed them before ended before it published them",
}
_SIMPLE = {"last_token": "the last token always is computed"}
_UNAVAILABLE = {
    "breaker": "was given a rest after failures",
    "late": "did not answer in time",
    "error": "failed",
}


def shown(text: str) -> str:
    """Quote ``text``, cut it, and escape what is not printable.

    Control characters and those that change the direction of writing then have no effect.
    """
    if len(text) > _MOST:
        text = text[:_MOST] + "…"
    return f"'{visible(text)}'"


def _name(identity: str) -> str:
    """Return a request's id, without quotes if it is a plain one."""
    plain = identity.isascii() and identity.replace("-", "").replace(".", "").isalnum()
    return identity if plain and len(identity) <= _MOST else shown(identity)


def sentence_of(spans: Sequence[Span], tokens: int) -> str:
    """Return one sentence for the main reason why tokens of a prompt were computed.

    It also says which tokens are a public prefix's.
    """
    return _computed(spans, tokens) + _shared(spans)


def why_of(span: Span) -> str | None:
    """Return why the tokens of a span were computed, as a clause; None for those reused."""
    return None if span.reason is None else _because(span.reason, span.evidence)


def _shared(spans: Sequence[Span]) -> str:
    """Return what to add about tokens that were read from the one copy of a public prefix."""
    count = sum(span.tokens for span in spans if span.source and span.evidence.get("public"))
    return f"; {count:,} were read from the public prefix, shared by all tenants" if count else ""


def _computed(spans: Sequence[Span], tokens: int) -> str:
    """Return the main reason why tokens of a prompt were computed."""
    totals: dict[tuple[str, bool], int] = {}
    first: dict[tuple[str, bool], Span] = {}
    for span in spans:
        if span.reason is not None:
            why = span.reason, bool(span.evidence.get("public"))
            totals[why] = totals.get(why, 0) + span.tokens
            if span.tokens > (first[why].tokens if why in first else 0):
                first[why] = span
    computed = sum(totals.values())
    main = max(totals, key=lambda why: totals[why])
    if main[0] == "last_token" and computed == 1:
        return _all_but_the_last(spans, tokens)
    of_them = "" if totals[main] == computed else f", {totals[main]:,} of them because"
    begin = f"{computed:,} of {tokens:,} tokens computed{of_them}"
    return f"{begin}{'' if of_them else ':'} {_because(main[0], first[main].evidence)}"


def _all_but_the_last(spans: Sequence[Span], tokens: int) -> str:
    sources = dict.fromkeys(span.source for span in spans if span.source is not None)
    if not sources:
        return f"{tokens:,} of {tokens:,} tokens computed: the last token always is"
    places = _listed("the pool" if name == "pool" else shown(name) for name in sources)
    return (
        f"1 of {tokens:,} tokens computed: the last token always is, all others came from {places}"
    )


def _listed(words: Iterable[str]) -> str:
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def _because(reason: str, evidence: Mapping[str, Any]) -> str:
    """Return the reason as a clause that follows a colon."""
    if evidence.get("public") and reason == "new":
        return "they are of a public prefix, which was not cached yet"
    tier = evidence.get("tier")
    where = "a tier" if tier is None else f"tier {shown(tier)}"
    match reason:
        case "diverged":
            other = evidence.get("nearest")
            what = "in the bytes of" if evidence.get("extra") else "at"
            return (
                f"they differ from {'a cached prompt' if other is None else _request(other)} "
                f"{what} token {evidence['position']:,}, and go on the same behind it"
            )
        case "evicted":
            return _evicted(evidence)
        case "not_admitted":
            return _WHY_NOT.get(evidence.get("why", ""), "they were seen before and never kept")
        case "other_namespace":
            names = [_FIELDS.get(name, name) for name in evidence.get("fields", {})]
            return f"they were cached in another namespace, whose {_listed(names)} differs"
        case "page_remainder":
            size = evidence.get("page_size")
            return f"they are part of a page of {size} tokens that is not there as a whole"
        case "not_resumable":
            return _unresumed(evidence)
        case "computing":
            by = evidence.get("by")
            return f"{'another request' if by is None else _request(by)} was just computing them"
        case "not_loaded":
            return _not_loaded(evidence, where)
        case "tier_unavailable":
            # A tier that others write to cannot be asked what it has while it does not answer.
            trouble = _UNAVAILABLE.get(evidence.get("why", ""), "failed")
            return f"{where} may have them and {trouble}"
        case "damaged":
            return f"{where} had them, and their checksum was wrong"
        case _:
            return _SIMPLE.get(reason, "they were never seen before")


def _request(identity: str) -> str:
    return f"request {_name(identity)}"


def _evicted(evidence: Mapping[str, Any]) -> str:
    ago, tier = evidence.get("ago_s"), evidence.get("tier")
    text = "they are of a public prefix, and were" if evidence.get("public") else "they were"
    text += " evicted"
    if tier not in {None, "", "pool"}:
        text += f" from tier {shown(tier)}"
    if ago is not None:
        text += f" {duration(ago)} ago"
    cause = _CAUSES.get(evidence.get("cause", ""))
    return text if cause is None else f"{text}, {cause}"


def _not_loaded(evidence: Mapping[str, Any], where: str) -> str:
    """Return why stored tokens were computed, with the expected seconds of both."""
    if evidence.get("why") == "overtaken":
        return f"they were computed, since loading them from {where} turned slow"
    load_s, compute_s = evidence.get("load_s"), evidence.get("compute_s")
    if not load_s or not compute_s:
        return f"loading them from {where} would have taken longer"
    return (
        f"loading them from {where} would have taken {_short(load_s)}, computing "
        f"{_short(compute_s)}"
    )


def _short(seconds: float) -> str:
    """Format the seconds of a load: "80 ms", "1.2 s"."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _unresumed(evidence: Mapping[str, Any]) -> str:
    stored, nearest = evidence.get("stored", 0), evidence.get("nearest", 0)
    text = f"their KV is cached up to token {stored:,}, but "
    if evidence.get("group") == "window":
        text += "the window before that is no longer kept; "
        return f"{text}the nearest is before token {nearest:,}" if nearest else f"{text}no other is"
    text += "no state is stored there; "
    text += f"the nearest is at {nearest:,}" if nearest else "nor is there any before"
    if evidence.get("why") == "grid":
        text += f"; states are kept at multiples of {evidence.get('grid'):,} tokens"
    return text


def duration(seconds: float) -> str:
    """Format seconds: "0.4 s", "12 s", "3 min", "5 h", "2 days"."""
    if seconds < 1:
        return f"{seconds:.1f} s"
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def cause_sentence(
    reason: str, share: float, tenant: str | None, evidence: Mapping[str, Any], *, tenants: int = 1
) -> str:
    """Return one sentence for a cause: its share of computed tokens, the tenant, and why.

    ``tenant`` is None for several ``tenants``.
    """
    if tenant is None:
        whose = f"prompts of {tenants:,} tenants"
    else:
        whose = f"prompts of cache_salt {shown(tenant)}" if tenant else "prompts without cache_salt"
    percent = f"{100 * share:.0f} %" if share >= _PERCENT else "less than 1 %"
    return f"{percent} of all computed tokens: {whose} {_of_prompts(reason, evidence)}"


def _of_prompts(reason: str, evidence: Mapping[str, Any]) -> str:
    match reason:
        case "diverged":
            many = evidence["differs"]
            how = f"a difference of {many:,} token{'s' * (many != 1)}" if many else "something less"
            at = evidence["position"]
            return f"differ at {'several positions' if at is None else f'token {at:,}'} ({how})"
        case "evicted":
            tier = evidence.get("tier")
            place = "the pool" if tier in {None, "", "pool"} else f"tier {shown(tier)}"
            return f"come again after {place} evicted them"
        case "not_admitted":
            return f"come again, and {_WHY_NOT.get(evidence.get('why', ''), 'they were not kept')}"
        case "not_loaded":
            return f"were faster to compute: {_because(reason, evidence)}"
        case "tier_unavailable" | "damaged" | "other_namespace" | "computing":
            return f"could not be reused: {_because(reason, evidence)}"
        case "not_resumable" if evidence.get("group") == "window":
            return "have their KV cached, but not the window before the place to go on"
        case "not_resumable":
            return "have their KV cached, but no state where they could go on"
        case "page_remainder":
            return "end within a page, or share one in part"
        case "last_token":
            return "need their last token computed, always"
        case _ if evidence.get("public"):
            return "begin with a public prefix that was not cached yet"
        case _:
            return "contain tokens never seen before"
