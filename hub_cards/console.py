"""What a command line keeps from the terminal: messages of other packages that its user can do nothing about."""

import logging
import os
import warnings


def quiet() -> None:
    """
    Leave out, for the rest of the process, what calls for no action of a user; with REVELA_DEBUG nothing is left out.

    That is other packages' notice of what they will rename, DeepSpeed's word that there is no GPU, and transformers'
    table of weights that a file has beyond those that a model takes. A table with weights that are missing stays.
    """
    if os.environ.get("REVELA_DEBUG"):
        return
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("DeepSpeed", "transformers.modeling_utils"):
        logging.getLogger(name).addFilter(_is_told)


def _is_told(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if "LOAD REPORT" in message:
        return any(f"| {status}" in message for status in ("MISSING", "MISMATCH", "CONVERSION"))
    return not message.startswith("Setting accelerator to CPU")


__all__ = ["quiet"]
