"""Options of the connector, given when vLLM starts, and of a single request."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, told
from kvkeep.integrations.options import (
    EngineOptions,
    checked,
    count_of,
    option,
    seconds_of,
    text_of,
    truth_of,
)
from kvkeep.integrations.status_options import address_text, key_in, key_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["ConnectorOptions", "RequestOptions"]

_LOG = logging.getLogger("kvkeep.vllm")
_DEFAULT_PIN_S = 3600.0


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
        capture: path of a trace to write, one line for each request, for ``kvkeep replay``;
            empty: none.
        public_prefixes: path of a file with prefixes whose blocks are stored once for all cache
            salts (`kvkeep.core.prefix_file`); empty: none.
        status: address at which the connector tells of requests and tiers; empty: nowhere. With
            several data-parallel ranks, the ports follow each other.
        status_key: what readers of the status must send; empty: nothing.
        status_key_file: the key that is in a file, instead.
    """

    min_tokens: int | None = option(None, _least_tokens)
    answers: bool = option(True, truth_of)
    unread: bool = option(False, truth_of)
    resets: bool = option(True, truth_of)
    capture: str = option("", text_of)
    public_prefixes: str = option("", text_of)
    status: str = option("", address_text)
    status_key: str = option("", key_of, shown=False)
    status_key_file: str = option("", key_in, shown=False)

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> ConnectorOptions:
        """See `EngineOptions.from_json`."""
        options = cls.from_json(given, "kv_connector_extra_config")
        if options.status_key and options.status_key_file:
            raise InvalidValue("status_key and status_key_file are given; leave one of them out")
        if not options.status and (options.status_key or options.status_key_file):
            raise InvalidValue('a key is given, and no address: add "status": "127.0.0.1:8201"')
        return options


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
    def of_request(cls, request: str, params: object, counts: Counts) -> RequestOptions:
        """As `parse`, but wrong parameters are ignored, logged and counted."""
        try:
            return cls.parse(params)
        except InvalidValue as error:
            counts.add(ignored_params=1)
            _LOG.warning(
                "kv_transfer_params of request %.100r are ignored: %.500s", request, str(error)
            )
            return cls()

    @classmethod
    def parse(cls, params: object) -> RequestOptions:
        """Read ``kv_transfer_params``; parameters for other connectors are ignored.

        Raises:
            InvalidValue: an unknown option, or a value that an option cannot have.
        """
        given = params.get("kvkeep") if isinstance(params, dict) else None
        if given is None:
            return cls()
        if not isinstance(given, dict):
            raise InvalidValue(f"kvkeep is {told(given)}; an object is needed")
        options = checked(cls, given, "kvkeep has", "there are")
        if options.pop("pin", False):
            options["pin"] = options.pop("ttl", None) or _DEFAULT_PIN_S
        return cls(**options)
