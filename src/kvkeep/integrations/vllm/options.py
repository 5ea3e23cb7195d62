"""Options of the connector and of the tier, given when vLLM starts, and of a single request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import InvalidValue, did_you_mean, told
from kvkeep.integrations.options import (
    EngineOptions,
    checked,
    option,
    seconds_of,
    text_of,
    tiers_of,
    truth_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.integrations.vllm.stats import Counts

__all__ = [
    "MOST_MISTAKES",
    "ConnectorOptions",
    "OffloadOptions",
    "RequestMistakes",
    "RequestOptions",
]

_DEFAULT_PIN_S = 3600.0
_MOST_NAMES: Final = 32  # of other connectors, which a request names
_LOG = logging.getLogger("kvkeep.vllm")
MOST_MISTAKES: Final = 32
"""Different mistakes of requests that are logged."""


@dataclass(frozen=True, slots=True)
class ConnectorOptions(EngineOptions):
    """Options in ``kv_connector_extra_config``.

    ``load_timeout`` is for the load of one request; tokens that have not arrived are computed.

    Attributes:
        compare_costs: whether KV is loaded only where that is faster than computing it; False:
            whatever is stored is loaded.
        resets: whether vLLM's resets of connectors delete the namespace: a request to
            ``reset_prefix_cache(reset_connector=True)``, a pause that clears caches, and sleep.
            False where the weights are the same after each of them.
        public_prefixes: path of a file with prefixes whose blocks are stored once for all cache
            salts (`kvkeep.core.public`); empty: none.
    """

    compare_costs: bool = option(True, truth_of)
    resets: bool = option(True, truth_of)
    public_prefixes: str = option("", text_of)

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> ConnectorOptions:
        """See `EngineOptions.from_json`."""
        return cls.from_json(given, "kv_connector_extra_config")


def _tiers_below(name: str, value: object) -> tuple[str, ...]:
    tiers = tiers_of(name, value)
    if any(tier.startswith("memory:") for tier in tiers):
        raise InvalidValue(
            f"{name} have memory://, which would keep what vLLM keeps in memory (cpu_bytes_to_use) "
            "a second time; leave it out, and give vLLM that memory"
        )
    return tiers


@dataclass(frozen=True, slots=True)
class OffloadOptions(ConnectorOptions):
    """Options of a `KVKeepTier`, in its entry in ``secondary_tiers``.

    ``tiers`` must be given, and have no ``memory://``.
    """

    tiers: tuple[str, ...] = option((), _tiers_below)

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> OffloadOptions:
        """See `EngineOptions.from_json`.

        Raises:
            InvalidValue: also if there are no tiers.
        """
        options = cls.from_json(given, "KVKeepTier in secondary_tiers")
        if not options.tiers:
            raise InvalidValue(
                "KVKeepTier in secondary_tiers has no tiers; give the places to keep KV in, "
                'fastest first, as "tiers": ["file:///var/lib/kvkeep?size=500GiB"]'
            )
        return options


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
        load: whether stored KV is used.
        ttl: seconds after which blocks that this request was the first to store are deleted;
            None: never.
        pin: seconds for which all its blocks are protected from eviction; None: not at all. A
            client gives ``"pin": true``, and ``ttl`` is then the duration, by default an hour.
    """

    store: bool = option(True, truth_of)
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


class RequestMistakes:
    """Reads the options of requests, whose mistakes never fail a request.

    Each mistake is counted as ``ignored_params``. It is logged if it is the first of its kind, and
    at most `MOST_MISTAKES` are: a client may make up new ones with every request.

    Thread safety: none; it belongs to the scheduler's thread. Memory: `MOST_MISTAKES` messages.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._logged: set[str] = set()

    def options(self, request: str, params: object) -> RequestOptions:
        """Return the options in the ``kv_transfer_params`` of ``request``; the defaults if wrong.

        Cost: a microsecond.
        """
        try:
            return RequestOptions.parse(params)
        except InvalidValue as error:
            self._counts.add(ignored_params=1)
            mistake = f"{error}"[:500]
        if mistake not in self._logged and len(self._logged) < MOST_MISTAKES:
            self._logged.add(mistake)
            _LOG.warning(
                "kv_transfer_params of request %.100r: all of kvkeep's are ignored: %s (the same "
                "mistake is not logged again, and counted as ignored_params)",
                request, mistake,
            )  # fmt: skip
        return RequestOptions()
