"""Records in an object store: S3 and compatible servers, Google Cloud Storage, Azure Blob.

backend.py   ObjectBackend: records as objects of any obstore store
clouds.py    S3Backend, GoogleBackend, AzureBackend: the stores that have a URL
usage.py     bytes held, for a place that does not count them itself
"""

from __future__ import annotations

from kvkeep.store.backends.objects.backend import (
    AzureBackend,
    GoogleBackend,
    ObjectBackend,
    S3Backend,
)

__all__ = ["AzureBackend", "GoogleBackend", "ObjectBackend", "S3Backend"]
