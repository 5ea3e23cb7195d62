"""`MessageWriter`: builds the answers of ``/v1/messages`` from the engine's deltas."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvkeep.serve.messages import MessageEvents, new_id, split_usage
from kvkeep.serve.server.framing import MESSAGES
from kvkeep.serve.server.pins import Keep
from kvkeep.serve.server.schemas.messages import MessageEvent, MessageResponse
from kvkeep.serve.server.writers import retained

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from kvkeep.serve.engine import Choice, Completion, Delta
    from kvkeep.serve.messages import MessagesCall, MessageUsage
    from kvkeep.serve.server.framing import Frames

__all__ = ["MessageWriter"]


class MessageWriter:
    """Builds one message.

    ``keep`` has the breakpoints and what became of them, ``retain`` those that are kept in the
    tiers, and ``call`` is the request: set them before the first delta. The first event waits for
    the first token, because it has the tokens that were read from the cache.
    """

    frames: ClassVar[Frames] = MESSAGES

    def __init__(self, model: str) -> None:
        self.id = new_id()
        self.call: MessagesCall | None = None
        self.keep = Keep(())
        self.retain: Keep | None = None
        self._events = MessageEvents(self.id, model)
        self._begun = False

    def begin(self) -> Iterator[MessageEvent]:
        """Yield nothing."""
        return iter(())

    def more(self, number: int, delta: Delta) -> Iterator[MessageEvent]:
        """Yield the beginning of the message before the first text, and the text."""
        if not self._begun:
            self._begun = True
            cached = delta.request.cached_tokens or 0
            usage = split_usage(delta.request.prompt_tokens, cached, self.keep.wanted)
            yield from _made(self._events.start(usage))
        if self._answers:
            yield from _made(self._events.text(delta.text))

    def end(self, completions: Sequence[Completion]) -> Iterator[MessageEvent]:
        """Yield the end of the text, the reason and the usage."""
        (completion,) = completions
        reason, stop = self._reason(completion.choices[0])
        yield from _made(self._events.end(reason, stop, self._usage(completion)))

    def whole(self, completions: Sequence[Completion]) -> MessageResponse:
        """Return the complete message."""
        (completion,) = completions
        usage, choice = self._usage(completion), completion.choices[0]
        self._events.start(usage)
        if self._answers:
            self._events.text(choice.text)
        self._events.end(*self._reason(choice), usage)
        return MessageResponse(**self._events.message)

    @property
    def _answers(self) -> bool:
        """Whether an answer is wanted, not only a cached prompt."""
        assert self.call is not None
        return self.call.max_tokens > 0

    def _reason(self, choice: Choice) -> tuple[str, str | None]:
        assert self.call is not None
        if choice.finish_reason == "stop":
            return ("end_turn", None) if choice.stop is None else ("stop_sequence", choice.stop)
        if len(choice.tokens) < self.call.max_tokens:
            return "model_context_window_exceeded", None
        return "max_tokens", None

    def _usage(self, completion: Completion) -> MessageUsage:
        more: dict[str, Any] = {"loaded_tokens": completion.loaded_tokens}
        if self.keep.wanted:
            more["pinned_tokens"] = self.keep.pinned_tokens
            more["unpinned_tokens"] = self.keep.unpinned_tokens
        if self.retain is not None:
            more |= retained([self.retain])
        output = len(completion.choices[0].tokens) if self._answers else 0
        return split_usage(
            completion.prompt_tokens,
            completion.cached_tokens,
            self.keep.wanted,
            output=output,
            more=more,
        )


def _made(events: Iterable[Mapping[str, Any]]) -> Iterator[MessageEvent]:
    return (MessageEvent(**event) for event in events)
