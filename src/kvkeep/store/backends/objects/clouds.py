"""The object stores that have a URL: which class of obstore opens them, and with which settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from kvkeep.core.errors import InvalidValue, require

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

    from kvkeep.store.backends.urls import TierURL

__all__ = ["Opener", "opener_of"]

Opener = Callable[[float], "ObjectStore"]
"""Opens a store whose requests end within a timeout in seconds. Does not connect."""


@dataclass(frozen=True)
class Cloud:
    """One kind of object store.

    Attributes:
        store: name of its class in `obstore.store`.
        options: option of the URL → setting of obstore.
        settings: fixed settings.
    """

    store: str
    options: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)


CLOUDS: Final = {
    # Signing a payload means hashing it, which takes four times as long as sending it and adds
    # nothing to the checksum in each record.
    "s3": Cloud(
        "S3Store", {"endpoint": "endpoint", "region": "region"}, {"unsigned_payload": True}
    ),
    "gs": Cloud("GCSStore", {"endpoint": "base_url"}),
    "az": Cloud("AzureStore", {"endpoint": "endpoint"}),
}


def opener_of(url: TierURL) -> Opener:
    """Return what opens the bucket of ``url``; takes ``endpoint`` and ``region``.

    Raises:
        InvalidValue: a wrong scheme or option, no bucket, or credentials in the URL.
    """
    cloud = CLOUDS.get(url.scheme)
    if cloud is None:
        raise InvalidValue(f"{url.safe}: an object store is one of {', '.join(CLOUDS)}")
    if not url.host or url.port is not None:
        raise InvalidValue(
            f"{url.safe}: a bucket is needed, as in {url.scheme}://bucket/prefix; "
            "a server of your own goes into ?endpoint=http://host:port"
        )
    if url.username or url.password:
        raise InvalidValue(
            f"{url.safe}: credentials are not taken from the URL, but from the environment "
            "(AWS_ACCESS_KEY_ID …) or the cloud's own configuration"
        )
    settings = dict(cloud.settings)
    for option, setting in cloud.options.items():
        if (value := url.text(option)) is not None:
            settings[setting] = value
    endpoint = settings.get(cloud.options["endpoint"], "")
    if endpoint and not re.fullmatch(r"https?://[^@/?#]+/?[^@?#]*", endpoint):
        raise InvalidValue(f"endpoint= in {url.safe}; one is http://host:port or https://host")
    bucket, plain = url.place, endpoint.startswith("http://")
    kind = getattr(require("obstore.store", "objects"), cloud.store)

    def open_store(timeout: float) -> ObjectStore:
        client: ClientConfig = {
            "timeout": timedelta(seconds=timeout * 0.8),
            "connect_timeout": timedelta(seconds=timeout * 0.4),
            "user_agent": "kvkeep",
        }
        if plain:
            client["allow_http"] = True
        retry: RetryConfig = {
            "max_retries": 2,
            "retry_timeout": timedelta(seconds=timeout * 0.2),
            "backoff": {
                "init_backoff": timedelta(seconds=timeout * 0.01),
                "max_backoff": timedelta(seconds=timeout * 0.05),
            },
        }
        store: ObjectStore = kind(
            bucket, client_options=client, retry_config=retry, config=settings
        )
        return store

    return open_store
