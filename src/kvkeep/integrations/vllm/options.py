"""Options of the connector, given when vLLM starts, and of a single request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import InvalidValue, did_you_mean, told
from kvkeep.integrations.options import (
    EngineOptions,
    checked,
    count_of,
    option,
    seconds_of,
    text_of,
    truth_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ConnectorOptions", "RequestOptions"]

_DEFAULT_PIN_S = 3600.0
_MOST_NAMES: Final = 32  # of other connectors, which a request names


def _least_tokens(name: str, value: object) -> int | None:
    return None if value is None else count_of(name, value, 1)


@dataclass(frozen=True, slots=True)
class ConnectorOptions(EngineOptions):
    """Options in ``kv_connector_extra_config``.

    ``load_timeout`` is for the load of one request; tokens that have not arrived are computed.

    Attributes:
        min_tokens: the fewest tokens that a hit must save to be loaded; None: one block.
        answers: whether the KV of generated tokens is stored, and not only that of prompts.
        unread: whether that includes answers that are never read again, as chat templates leave
            reasoning out of later prompts.
        resets: whether vLLM's resets of connectors delete the namespace: a request to
            ``reset_prefix_cache(reset_connector=True)``, a pause that clears caches, and sleep.
            False where the weights are the same after each of them.
        public_prefixes: path of a file with prefixes whose blocks are stored once for all cache
            salts (`kvkeep.core.prefix_file`); empty: none.
    """

    min_tokens: int | None = option(None, _least_tokens)
    answers: bool = option(True, truth_of)
    unread: bool = option(False, truth_of)
    resets: bool = option(True, truth_of)
    public_prefixes: str = option("", text_of)

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> ConnectorOptions:
        """See `EngineOptions.from_json`."""
        return cls.from_json(given, "kv_connector_extra_config")


def _refuse_misplaced(params: Mapping[object, object], options: Sequence[str]) -> None:
    """Raise `InvalidValue` for a misspelt "kvkeep", or one of its options beside it.

    A client that writes so would be stored and loaded as if it had asked for nothing.
    """
    for name in islice(params, _MOST_NAMES):
        if not isinstance(name, str):
            continue
        misspelt = name[:1] in {"k", "K"} and name != "kvkeep" and did_you_mean(name, ["kvkeep"])
        if misspelt or name in options:
            raise InvalidValue(
                f'kv_transfer_params has {told(name)}; kvkeep reads {{"kvkeep": {{…}}}}, with '
                f"{', '.join(options)} inside"
            )


def _ttl(name: str, value: object) -> float | None:
    if value is None:
        return None
    seconds = seconds_of(name, value)
    if not seconds:
        raise InvalidValue(f"{name} is 0; a time above zero is needed")
    return seconds


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request, in ``kv_transfer_params["kvkeep"]``.

    Attributes:
        store: whether its KV is stored.
        answers: whether that includes generated tokens; only where `ConnectorOptions.answers` is
            true.
        load: whether stored KV is used.
        ttl: seconds after which blocks that this request was the first to store are deleted;
            None: never.
        pin: seconds for which all its blocks are protected from eviction; None: not at all. A
            client gives ``"pin": true``, and ``ttl`` is then the duration, by default an hour.
    """

    store: bool = option(True, truth_of)
    answers: bool = option(True, truth_of)
    load: bool = option(True, truth_of)
    ttl: float | None = option(None, _ttl)
    pin: float | None = option(None, truth_of)

    @classmethod
    def parse(cls, params: object) -> RequestOptions:
        """Read ``kv_transfer_params``; parameters for other connectors are ignored.

        Raises:
            InvalidValue: the parameters are no object, an unknown option, a value that an option
                cannot have, or kvkeep's name or options where they are not looked for.
        """
        if params is None:
            return cls()
        if not isinstance(params, Mapping):
            raise InvalidValue(f"they are {told(params)}; an object is needed")
        given = params.get("kvkeep")
        if given is None:
            _refuse_misplaced(params, [one.name for one in fields(cls)])
            return cls()
        if not isinstance(given, Mapping):
            raise InvalidValue(f"kvkeep is {told(given)}; an object is needed")
        options = checked(cls, given, "kvkeep has", "there are")
        if options.pop("pin", False):
            options["pin"] = options.pop("ttl", None) or _DEFAULT_PIN_S
        return cls(**options)
