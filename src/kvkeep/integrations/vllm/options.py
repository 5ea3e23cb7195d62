"""What can be chosen: for the connector when vLLM starts, and for each request."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.given import count_of, refuse_unknown, seconds_of, tiers_of, truth_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ConnectorOptions", "Wishes"]

_DEFAULT_PIN_S = 3600.0


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """``kv_connector_extra_config``: times in seconds.

    Attributes:
        tiers: URLs of the store, fastest first.
        load_timeout: for the load of one request; what is not there by then is computed.
        lookup_timeout: for the question to places that others write to.
        flush_timeout: at shutdown, for what still waits to be written.
        revision: which weights these are, where no files say so.
        tenant: what keeps this engine's KV from being found by engines of other tenants.
        min_tokens: a hit that saves fewer is not loaded; None: one block.
        answers: store the KV of generated tokens; False: of prompts alone.
        capture: a file that gets a line for each request, to be replayed; "": none.
    """

    tiers: tuple[str, ...] = ("memory://1GiB",)
    load_timeout: float = 5.0
    lookup_timeout: float = 0.5
    flush_timeout: float = 10.0
    revision: str = ""
    tenant: str = ""
    min_tokens: int | None = None
    answers: bool = True
    capture: str = ""

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> ConnectorOptions:
        """Check what was given.

        Raises:
            InvalidValue: an option that there is not, or a value that it cannot have.
        """
        known = [field.name for field in fields(cls)]
        refuse_unknown(given, known, "kv_connector_extra_config has", "kvkeep's options are")
        options = dict(given)
        if "tiers" in options:
            options["tiers"] = tiers_of(options["tiers"])
        for name in ("load_timeout", "lookup_timeout", "flush_timeout"):
            if name in options:
                options[name] = seconds_of(name, options[name])
        for name in ("revision", "tenant", "capture"):
            if not isinstance(options.get(name, ""), str):
                raise InvalidValue(f"{name} is {options[name]!r}; text is needed")
        if options.get("min_tokens") is not None:
            options["min_tokens"] = count_of("min_tokens", options["min_tokens"], 1)
        truth_of("answers", options.get("answers", True))
        return cls(**options)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Wishes:
    """``kv_transfer_params["kvkeep"]`` of a request.

    Attributes:
        store: keep what is computed.
        answers: keep the KV of generated tokens, too, where the connector's option keeps it.
        load: use what is kept.
        ttl: seconds after which what it was the first to store is deleted; None: never.
        pin: seconds for which all its blocks are kept from eviction; None: not at all.
    """

    store: bool = True
    answers: bool = True
    load: bool = True
    ttl: float | None = None
    pin: float | None = None

    @classmethod
    def parse(cls, params: object) -> Wishes:
        """From the parameters of a request; what is not for kvkeep is not looked at.

        ``pin`` makes ``ttl`` the time for which it holds, an hour if there is none.

        Raises:
            InvalidValue: something is wrong, and what would be right.
        """
        given = params.get("kvkeep") if isinstance(params, dict) else None
        if given is None:
            return _DEFAULT
        if not isinstance(given, dict):
            raise InvalidValue(f"kvkeep is {given!r}; an object is needed")
        refuse_unknown(given, [field.name for field in fields(cls)], "kvkeep has", "there are")
        for name in ("store", "answers", "load", "pin"):
            truth_of(name, given.get(name, False))
        ttl = seconds_of("ttl", given["ttl"]) if given.get("ttl") is not None else None
        if ttl == 0:
            raise InvalidValue("ttl is 0; a time above zero is needed")
        pin = given.get("pin", False)
        return cls(
            store=given.get("store", True),
            answers=given.get("answers", True),
            load=given.get("load", True),
            ttl=None if pin else ttl,
            pin=(ttl or _DEFAULT_PIN_S) if pin else None,
        )


_DEFAULT = Wishes()
