"""Opening a sequence: query the index, check that enough pages are available, then take them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.cache.sequence import Border, SaltedRow, Sequence, TokenRow
from kvkeep.core.cache.sessions import check_name
from kvkeep.core.errors import InvalidValue
from kvkeep.core.events import Opened
from kvkeep.core.extras import as_extras
from kvkeep.core.keys import Namespace, as_namespace
from kvkeep.core.pages import PageCopy
from kvkeep.core.prefix.results import EMPTY_PAGES
from kvkeep.core.public import salt_of
from kvkeep.core.tokens import as_row, check_range

if TYPE_CHECKING:
    from kvkeep.core.cache.core import Core
    from kvkeep.core.extras import ExtraLike, Extras
    from kvkeep.core.groups import GroupBoard, SequenceGroups
    from kvkeep.core.keys import NamespaceLike
    from kvkeep.core.prefix import PrefixMatch
    from kvkeep.core.tokens import TokenArray, TokensLike

__all__ = ["CacheQuery", "find", "matched_tokens", "open_sequence"]


@dataclass(slots=True)
class CacheQuery:
    """A prompt to look up or to open, in canonical form.

    ``namespace`` is whose prompt it is, ``space`` the one in whose tree it lies: the public one if
    its first ``public`` tokens are public (`kvkeep.core.public`). ``extras`` include the salt.
    """

    tokens: TokenArray
    namespace: Namespace
    extras: Extras
    session: str | None = None
    space: Namespace = field(default_factory=Namespace)
    public: int = 0

    @classmethod
    def of(
        cls,
        core: Core,
        tokens: TokensLike,
        namespace: NamespaceLike,
        extra: ExtraLike | None,
        *,
        session: str | None = None,
    ) -> CacheQuery:
        """Convert and check arguments; token ids are checked later, against the match."""
        row = as_row(tokens)
        space = as_namespace(namespace)
        extras = () if extra is None else as_extras(extra, len(row))
        if session is not None:
            session = check_name(session)
        if space.scope:
            raise InvalidValue(
                f"{space} is for declared public prefixes; a prompt has a namespace without scope"
            )
        if not len(core.public):
            return cls(row, space, extras, session, space)
        placed = core.public.place(row, space, core.page_size, extras)
        return cls(row, space, placed.extras, session, placed.space, placed.tokens)


def find(core: Core, query: CacheQuery) -> PrefixMatch | None:
    """Return the longest match of a query; `InvalidValue` for a negative token id."""
    match = None
    if core.reuse:
        row = core.marks.known(query.tokens, query.extras) if query.extras else query.tokens
        match = core.index.match(core.index.encoder(query.space).lookup(row), query.space)
    _check_ids(core, query.tokens, match)
    return match


def matched_tokens(core: Core, match: PrefixMatch | None) -> int:
    """Return how many leading tokens a match covers."""
    return 0 if match is None else len(match.pages) * core.page_size + match.partial_tokens


def _check_ids(core: Core, tokens: TokenArray, match: PrefixMatch | None) -> None:
    """Refuse negative ids.

    Tokens that equal stored ones are not negative, unless marks are stored: then all of the
    prompt is checked.
    """
    check_range(tokens, 0 if len(core.marks) else matched_tokens(core, match))


def open_sequence(core: Core, query: CacheQuery, *, priority: int, reserve: int) -> Sequence:
    """Open a sequence; see `PagedCache.open`. The caller has the lock."""
    tokens, space, extras = query.tokens, query.space, query.extras
    if not len(tokens):
        raise InvalidValue("a prompt has at least one token, got none")
    index = core.index
    encoder = index.encoder(space)
    # The last token is never looked up: its logits are needed, so it is computed in any case.
    wanted = core.marks.known(tokens[:-1], extras) if extras else tokens[:-1]
    match = index.match(encoder.lookup(wanted), space) if core.reuse else None
    _check_ids(core, tokens, match)
    total = -(-len(tokens) // core.page_size)
    groups, state_pages, found, stored = None, 0, 0, 0
    if core.groups is None:
        match, needed = _affordable(core, match, total, reserve)
    else:
        state_pages = core.groups.layout.state_pages
        if match is not None:
            found, stored = len(match.pages), matched_tokens(core, match)
        groups, match = _resume(core, core.groups, match, total + state_pages + reserve)
        needed = total + state_pages - (0 if match is None else len(match.pages))
    hold, source = core.index.hold(match, space)
    row = _row(core, query)
    sequence = Sequence(core, query.namespace, encoder, row, hold=hold, priority=priority)
    sequence.space = space
    sequence.public_pages = query.public // core.page_size if query.public else None
    shared = EMPTY_PAGES if match is None else match.pages
    sequence.num_cached = matched_tokens(core, match)  # observers read it
    if query.session is not None:
        core.observe(core.sessions)
    for observer in core.observers:  # before `take` evicts: sessions order eviction
        observer.opened(sequence, query, shared)
    table = core.take(needed)
    if groups is not None:
        state = table[:state_pages] if state_pages else None
        table = table[state_pages:]
        groups.begin(state, row, found=found)
        sequence.groups = groups
    if len(shared):
        table = np.concatenate((shared, table))
    copy = None
    if match is not None and source is not None:
        copy = PageCopy(match.partial_page, int(table[len(shared)]), match.partial_tokens)
        core.pool.retain_page(copy.src)
        core.counters.partial_hits += 1
    sequence.adopt(table, len(shared), copy=copy, source=source)
    _count(core, sequence, found, stored)
    return sequence


def _row(core: Core, query: CacheQuery) -> TokenRow:
    if not query.public:
        return TokenRow(core.marks, query.tokens, query.extras)
    border = Border(query.public, core.page_size, salt_of(query.namespace))
    return SaltedRow(core.marks, query.tokens, query.extras, border)


def _count(core: Core, sequence: Sequence, found: int, stored: int) -> None:
    """Count and report a sequence that was opened; ``found`` pages, ``stored`` tokens matched."""
    prompt, cached = sequence.num_tokens, sequence.num_cached
    core.counters.opened += 1
    core.counters.prompt_tokens += prompt
    core.counters.hit_tokens += cached
    if core.groups is not None:
        core.groups.counters.unresumed_tokens += found * core.page_size - cached
    if core.hooks:
        core.emit(
            Opened(
                sequence.id,
                sequence.namespace,
                prompt,
                cached,
                stored_tokens=None if core.groups is None else stored,
                returned=None if core.returning is None else core.returning.returned(sequence.id),
            )
        )


def _resume(
    core: Core, board: GroupBoard, match: PrefixMatch | None, total: int
) -> tuple[SequenceGroups, PrefixMatch | None]:
    """Shorten a match to where all groups agree, and take references to what resuming there reads.

    A request takes ``total`` pages in all, less those that match. If it does not fit beside what
    resuming reads, it resumes earlier. `OutOfPages` before any change.
    """
    from kvkeep.core.groups import SequenceGroups  # noqa: PLC0415 - only where needed

    core.pins.expire()
    page = 0 if match is None else len(match.pages)
    given_up = 0
    while True:
        groups = SequenceGroups(board, core)
        path = EMPTY_PAGES if match is None else match.pages[:page]
        page, checkpoint = board.resume(path)
        groups.hold(path[:page], checkpoint)
        taken = None if match is None or not page else match.first(page)
        available = core.available() - core.index.protects(taken)
        if total - page <= available:
            board.counters.resumes_given_up += given_up
            return groups, taken
        groups.give_up()
        if not page:
            raise core.short_of(total, available)
        given_up = 1
        # Without states, an earlier position holds about as many pages.
        page = 0 if board.layout.state is None else page - 1


def _affordable(
    core: Core, match: PrefixMatch | None, total: int, reserve: int
) -> tuple[PrefixMatch | None, int]:
    """Return the match to hold and the pages needed besides; `OutOfPages` before any change.

    Holding a match takes its pages out of what can be evicted. A page that matches only in part
    is left out of the match if the request could not be opened with that page held.
    """
    needed = total - (0 if match is None else len(match.pages))
    if needed + reserve <= core.pool.num_free:
        return match, needed
    core.pins.expire()
    available = core.available() - core.index.protects(match)
    if needed + reserve > available and match is not None and match.source is not None:
        match = match.without_partial()
        available = core.available() - core.index.protects(match)
        if needed + reserve <= available:
            core.counters.partial_hits_given_up += 1
    if needed + reserve > available:
        raise core.short_of(needed + reserve, available)
    return match, needed
