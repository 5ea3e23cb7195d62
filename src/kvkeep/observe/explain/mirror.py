"""`Mirror`: follows the content of a cache and its requests, to judge prompts."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.events import Closed, Evicted, GroupsStored, Opened, Stored
from kvkeep.core.extras import signed
from kvkeep.core.keys import chain_keys
from kvkeep.core.public import PublicPrefixes, public_namespace
from kvkeep.observe.explain.ledger import UNKNOWN, Eviction, Requester, UnitLedger
from kvkeep.observe.explain.nearest import Anchors, PromptHistory, SeenPrompt
from kvkeep.observe.explain.reasons import QueriedPrompt, Reasons

if TYPE_CHECKING:
    from kvkeep.core.events import Event
    from kvkeep.core.extras import Extras
    from kvkeep.core.groups import GroupLayout
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.observe.explain.answer import Span
    from kvkeep.observe.explain.ledger import Rows

__all__ = ["Mirror"]

_MOST_OPEN = 10_000


class _Opening(NamedTuple):
    """An `Opened` event: its number, the eviction that made room, and the tokens that matched."""

    number: int | None = None
    made_room: Eviction | None = None
    stored: int | None = None


class Mirror:
    """The unit ledger and the latest prompts, kept up to date by events and requests in order.

    Thread safety: none.
    """

    def __init__(
        self,
        page_size: int,
        policy: str,
        units: int,
        prompt_tokens: int,
        groups: GroupLayout | None = None,
    ) -> None:
        self._public = PublicPrefixes()
        self.ledger = UnitLedger(page_size, units, points=groups is not None)
        self.prompts = PromptHistory(prompt_tokens)
        self._reasons = Reasons(self.ledger, self.prompts, policy, groups)
        self._number = 0  # events so far
        self._before: Event | None = None
        self._gone: tuple[Evicted, Eviction] | None = None  # the last one, not applied yet
        self._opened: OrderedDict[int, _Opening] = OrderedDict()  # by sequence
        self._open: OrderedDict[int, SeenPrompt] = OrderedDict()

    def share(self, public: PublicPrefixes) -> None:
        """Judge prompts with these public prefixes."""
        self._public = public

    # --- events ------------------------------------------------------------------------------

    def see(self, event: Event, at: float) -> None:
        """Follow the next event of the cache, at time ``at``."""
        self._number += 1
        made_room = self._made_room(event)
        if made_room is None:
            self._settle()
        match event:
            case Stored():
                self._stored(event, at)
            case GroupsStored():
                for point in event.checkpoints:
                    self.ledger.point_changed(point.page, self._number)
            case Evicted():
                self._gone = (event, Eviction(at, event.reason))
                if event.reason != "pressure":
                    self._settle()
            case Opened():
                self._opened[event.sequence] = _Opening(
                    self._number, made_room, event.stored_tokens
                )
                if len(self._opened) > _MOST_OPEN:
                    self._opened.popitem(last=False)
            case Closed():
                self._opened.pop(event.sequence, None)
                self._open.pop(event.sequence, None)
        self._before = event

    def _made_room(self, event: Event) -> Eviction | None:
        """Return the eviction that made room for the sequence that ``event`` opens, if any.

        It is the event right before. Its pages were evicted after the lookup of the prompt, so the
        prompt is judged before the eviction is applied.
        """
        if self._gone is None or self._gone[0] is not self._before:
            return None
        return self._gone[1] if isinstance(event, Opened) and event.forked_from is None else None

    def _settle(self) -> None:
        """Apply the last eviction to the ledger."""
        if self._gone is not None:
            (event, eviction), self._gone = self._gone, None
            for point in () if event.groups is None else event.groups.checkpoints:
                self.ledger.point_changed(point.page, eviction)
            self.ledger.gone(event.pages, eviction)
            self.ledger.forget()

    def _stored(self, event: Stored, at: float) -> None:
        prompt = self._open.get(event.sequence)
        parent = self.ledger.row_of(event.parent)
        if event.parent < 0:
            depth, above = 0, b""
        elif parent >= 0:
            depth, above = int(self.ledger.depth[parent]) + 1, self.ledger.name[parent]
        else:  # the parent's event was lost, or came before the first: no names can be made
            return
        names = self._names(event, prompt, depth, above)
        space = self.ledger.enter(event.namespace)
        rows = self.ledger.note(space, names, depth)
        state = event.sequence if prompt is None else prompt.requester
        self.ledger.stored(space, rows, event.pages, state, number=self._number, at=at)
        if prompt is not None:
            self.ledger.prompt[rows[: max(0, len(prompt.names) - depth)]] = prompt.number
            if depth <= len(prompt.names) < depth + len(names):
                prompt.requester.tail = names[len(prompt.names) - depth]
        self.ledger.forget()

    def _names(
        self, event: Stored, prompt: SeenPrompt | None, depth: int, above: bytes
    ) -> list[bytes]:
        """Return the names of stored units; those of the prompt are reused where tokens agree."""
        unit = self.ledger.unit_tokens
        tokens = signed(event.tokens, event.extras)
        names: list[bytes] = []
        if prompt is not None and depth < len(prompt.names):
            count = min(len(prompt.names) - depth, len(event.pages))
            own = prompt.tokens[depth * unit : (depth + count) * unit]
            follows = depth == 0 or prompt.names[depth - 1] == above
            if follows and np.array_equal(own, tokens[: count * unit]):
                names = prompt.names[depth : depth + count]
                above = names[-1]
        rest = tokens[len(names) * unit :]
        return names + chain_keys(above, rest.tobytes(), self.ledger.unit_bytes)

    # --- requests ----------------------------------------------------------------------------

    def prompt(
        self, plain: TokenArray, namespace: Namespace, requester: Requester, extras: Extras = ()
    ) -> SeenPrompt:
        """Return a prompt with its names and anchors. Changes nothing."""
        unit = self.ledger.unit_tokens
        placed = self._public.place(plain, namespace, unit, extras)
        tokens = signed(plain, placed.extras)
        data = tokens.tobytes()
        names = chain_keys(b"", data, self.ledger.unit_bytes)
        over = data[len(names) * self.ledger.unit_bytes :]
        tail = chain_keys(names[-1] if names else b"", over, len(over))[0] if over else None
        anchors, public = Anchors.of(tokens), placed.tokens // unit
        return SeenPrompt(requester, namespace, tokens, names, tail, anchors, plain, public)

    def _rows(self, prompt: SeenPrompt) -> Rows:
        """Return the row of each full unit of a prompt, -1 if it is unknown."""
        spaces, names, public = self.ledger.spaces, prompt.names, prompt.public
        rows = self.ledger.find(spaces.get(prompt.namespace), names[public:])
        if not public:
            return rows
        shared = spaces.get(public_namespace(prompt.namespace))
        return np.concatenate((self.ledger.find(shared, names[:public]), rows))

    def judged(
        self, prompt: SeenPrompt, *, cached: int, stored: int | None, at: float
    ) -> list[Span]:
        """Return the spans of a prompt as if it were opened now. Changes nothing."""
        self._settle()
        space = self.ledger.spaces.get(prompt.namespace)
        rows = self._rows(prompt)
        return self._reasons.spans(
            QueriedPrompt(prompt, space, rows, cached, at, None, None, stored or cached)
        )

    def opened(
        self, prompt: SeenPrompt, *, cached: int, sequence: int | None, at: float
    ) -> list[Span]:
        """Return the spans of a prompt that was opened, and remember the prompt."""
        opening = self._opening(sequence)
        made_room = opening.made_room
        if made_room is not None:
            made_room.by = prompt.id
            pages = -(-len(prompt.tokens) // self.ledger.unit_tokens)
            made_room.needed_pages = pages - cached // self.ledger.unit_tokens
        space = self.ledger.spaces.get(prompt.namespace)
        rows = self._rows(prompt)
        stored = opening.stored or cached
        query = QueriedPrompt(prompt, space, rows, cached, at, opening.number, sequence, stored)
        wrong = self._reasons.contradicted(query)
        if len(wrong):
            self.ledger.gone(self.ledger.page[wrong], Eviction(at, UNKNOWN))
        spans = self._reasons.spans(query)
        forgotten = self.ledger.forgotten
        self._settle()
        found = rows if forgotten == self.ledger.forgotten else None
        reused = max(cached, stored) // self.ledger.unit_tokens
        self._remember(prompt, reused, at, found)
        if sequence is not None:
            self._open[sequence] = prompt
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return spans

    def _opening(self, sequence: int | None) -> _Opening:
        """Return the event that opened a sequence."""
        if sequence is None and isinstance(self._before, Opened):  # the last event opened it
            sequence = self._before.sequence
        return _Opening() if sequence is None else self._opened.pop(sequence, _Opening())

    def _remember(self, prompt: SeenPrompt, cached: int, at: float, rows: Rows | None) -> None:
        """Record ``prompt``: ``cached`` leading units were reused, the others are computed."""
        ledger = self.ledger
        space = ledger.enter(prompt.namespace)
        rows = self._noted(prompt, self._rows(prompt) if rows is None else rows)
        if prompt.tail is not None:
            tail = ledger.note(space, [prompt.tail], len(prompt.names))
            before = ledger.state[tail[0]]
            if isinstance(before, Requester):  # both tails became the same full page
                prompt.requester.tail = before.tail
            ledger.requested(tail, prompt.requester)
        ledger.requested(rows[cached:], prompt.requester)
        there = rows[:cached]
        if len(there) and (ledger.page[there] < 0).any():
            # Cached in pages without a `Stored` event: their eviction will not be seen, either.
            ledger.requested(there, Eviction(at, UNKNOWN))
        numbers = ledger.prompt[rows[prompt.public :]]
        numbers = numbers[numbers >= 0]
        self.prompts.add(prompt, int(numbers[-1]) if len(numbers) else space.prompt)
        ledger.prompt[rows[prompt.public :]] = space.prompt = prompt.number
        if not space.rows:  # a public prefix and nothing else
            ledger.spaces.pop(prompt.namespace)
        ledger.forget()

    def _noted(self, prompt: SeenPrompt, rows: Rows) -> Rows:
        """Add the unknown units of a prompt to the ledger; return all rows."""
        ledger, public = self.ledger, prompt.public
        own = ledger.enter(prompt.namespace)
        private = ledger.note(own, prompt.names[public:], public, rows[public:])
        if not public:
            return private
        shared = ledger.enter(public_namespace(prompt.namespace))
        first = ledger.note(shared, prompt.names[:public], 0, rows[:public])
        return np.concatenate((first, private))
