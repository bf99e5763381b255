"""What of a run's settings can be told to be wrong before anything is loaded; each error names the setting."""

import os
from collections.abc import Mapping

from hub_cards.export import DTYPES
from trainers.backbones import say_once


def check_at_least(settings, **least: float) -> None:
    """Raises ValueError for a field of `settings` that lies below its bound; `None` is not looked at."""
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= bound:
            raise ValueError(f"`{name}` must be at least {bound}, not {value}.")


def check_lora(settings, half: str = "") -> None:
    """The same for rank, alpha and dropout of LoRA, whose fields begin with `half`."""
    check_at_least(settings, **{f"{half}lora_r": 0, f"{half}lora_alpha": 1})
    dropout = getattr(settings, f"{half}lora_dropout")
    if not 0 <= dropout < 1:
        raise ValueError(f"`{half}lora_dropout` must be at least 0 and below 1, not {dropout}.")


def check_choice(name: str, value: str, choices: tuple[str, ...] | Mapping[str, object]) -> None:
    """The same for a value that is none of its choices."""
    if value not in choices:
        raise ValueError(f"No {name} {value!r}: choose one of {', '.join(choices)}.")


def check_dtype(dtype: str) -> None:
    """The same for a precision."""
    check_choice("dtype", dtype, DTYPES)


def check_weights(names: list[str], weights: list[float] | None) -> None:
    """The same for `train_weights`, of which there is one for each of `train_sets`."""
    if weights is None:
        return
    if names and len(names) != len(weights):
        raise ValueError(
            f"`train_sets` has {len(names)} sets and `train_weights` {len(weights)} weights: give a weight each."
        )
    if not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"`train_weights` are {weights}: each must be above 0; leave out a set that has no weight.")


def check_steps(args) -> None:
    """The same for training arguments under which no step would be made, and an untrained model saved."""
    if args.max_steps <= 0 and not args.num_train_epochs > 0:
        raise ValueError(
            f"`num_train_epochs` is {args.num_train_epochs:g} and `max_steps` {args.max_steps}, so there is nothing "
            "to train: one of them must be above 0."
        )


def cap_workers(args) -> None:
    """Lower `dataloader_num_workers` of training arguments to this process' share of the machine's cores, and say so.

    Recipes are written for large machines; on a small one torch warns at each epoch of each process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if args.dataloader_num_workers > share:
        say_once(
            f"`dataloader_num_workers` is {share} instead of {args.dataloader_num_workers}: more have no core here."
        )
        args.dataloader_num_workers = share


__all__ = [
    "cap_workers",
    "check_at_least",
    "check_choice",
    "check_dtype",
    "check_lora",
    "check_steps",
    "check_weights",
]
