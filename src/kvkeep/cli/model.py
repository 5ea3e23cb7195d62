"""Arguments of the commands that run a model, and loading it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvkeep.cli.arguments import add_model_path, add_option, add_page_size, byte_size
from kvkeep.cli.tables import progress
from kvkeep.core.errors import require

if TYPE_CHECKING:
    import argparse

    from kvkeep.serve.engine import Runner, Tokenizer

__all__ = ["add_dtype", "add_model_arguments", "choose_threads", "load"]


def add_model_arguments(parser: argparse.ArgumentParser, *, memory: str) -> None:
    """Add the options of the model and its pages; ``memory`` is the default of ``--memory``."""
    model = parser.add_argument_group("model")
    add_model_path(model, "local Hugging Face model directory")
    add_option(
        model, "--memory SIZE", "memory for KV pages, such as 24GiB", type=byte_size, default=memory
    )
    add_page_size(model)
    model.add_argument(
        "--device", default="auto", help="torch device (default: a GPU if there is one)"
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add ``--dtype``, the type of the model's weights and KV."""
    parser.add_argument(
        "--dtype", help="float32, float16 or bfloat16 (default: as saved; float32 on a CPU)"
    )


def load(args: argparse.Namespace, *, dtype: str | None) -> tuple[Runner, Tokenizer]:
    """Load the model that `add_model_arguments` selected, and its tokenizer."""
    choose_threads(args)
    with progress("loading the model"):
        from kvkeep.serve.engine import Runner, Tokenizer  # noqa: PLC0415 - seconds, for torch
        from kvkeep.serve.models import bundled_model  # noqa: PLC0415

        logging = require("transformers", "transformers").utils.logging
        # Its progress bar would overwrite ours.
        logging.disable_progress_bar()
        # Its handler would write plain lines between our log lines, which may be JSON.
        logging.disable_default_handler()
        logging.enable_propagation()
        path = bundled_model() if args.model is None else args.model
        runner = Runner.load(
            path, memory=args.memory, page_size=args.page_size, device=args.device, dtype=dtype
        )
        return runner, Tokenizer.load(path)


def choose_threads(args: argparse.Namespace) -> None:
    """Use one thread for the bundled model: several spend more time waiting than computing.

    Call it before the import of torch, which reads OMP_NUM_THREADS. If the variable is set, it
    stays.
    """
    if args.model is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
