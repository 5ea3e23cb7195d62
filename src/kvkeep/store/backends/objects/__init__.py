"""Records in an object store: S3 and compatible servers, Google Cloud Storage, Azure Blob.

backend.py   ObjectBackend: records as objects of any obstore store, and the bytes they take
"""

from __future__ import annotations

from kvkeep.store.backends.objects.backend import ObjectBackend

__all__ = ["ObjectBackend"]
