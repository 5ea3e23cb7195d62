"""``python -m kvkeep`` is ``kvkeep``."""

from __future__ import annotations

import sys

from kvkeep.cli import main

if __name__ == "__main__":
    sys.exit(main())
