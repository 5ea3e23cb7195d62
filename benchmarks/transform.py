"""What `transform` gains and costs, and the spectra that explain it.

Of the bundled model and of one that is trained here (codecs_model.py; about five minutes, once):

- *spectra*: what each axis of KV carries, in nats a token, when channels of one head, of K and V of
  a head, of a layer, of several layers are transformed together; and the bits a number that the
  spectrum asks for at 2e-3 nats a token by reverse water-filling, plus a quarter for whole codes;
- the same with keys as they are cached, not turned back, and with all channels as sensitive;
- *measured*: bytes, nats behind several depths, GB/s of the thread's own CPU time, for bases of
  several widths and errors; and how many of the nats are due to the first tokens, and the newest.

A basis is fitted to other text than it is judged by. Seeded; one thread.

    python benchmarks/transform.py                       # the tables, about ten minutes
    python benchmarks/transform.py --quick               # the bundled model, less text
    python benchmarks/transform.py --json                # for machines
    python benchmarks/transform.py --picture FILE.svg    # spectra, and bytes against nats
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import torch
from codecs import_probes  # placeholder
