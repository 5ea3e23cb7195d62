"""How state machines search for faults that were planted.

A search takes seconds to minutes, so what it found lies in ``found/`` and is tried first; when that
shows a fault no longer, the search follows. ``KVKEEP_FUZZ=long`` searches in any case, and adds
what it finds.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ReadOnlyDatabase

_FOUND = DirectoryBasedExampleDatabase(Path(__file__).parent / "found")
_ANEW = os.environ.get("KVKEEP_FUZZ") == "long"

SEARCH = settings(
    max_examples=20_000,  # the rarest is found after some 700, so that it is missed once in e^28
    stateful_step_count=50,
    deadline=None,
    database=_FOUND if _ANEW else ReadOnlyDatabase(_FOUND),
    # No shrinking: it is enough to know that there is one.
    phases=[Phase.generate] if _ANEW else [Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
