"""How a model was trained, as a card tells it: the method's name, and the recipe and commands that train the same."""

from dataclasses import dataclass

import yaml


@dataclass(frozen=True)
class Method:
    """A method of training: how it is called, its paper, its `revela-hub train` command and options, and its text."""

    name: str
    paper: str
    script: str = "finetune"
    base: str = "model_name_or_path"
    data: str = "train_sets"
    learns_from: str = "raw text, without labels"


_JUDGED = {"data": "train_set", "learns_from": "queries with relevant documents"}
METHODS = {
    "revela": Method("Revela", "https://arxiv.org/abs/2506.16552", "revela", "retriever_name_or_path"),
    "replug": Method("REPLUG", "https://arxiv.org/abs/2301.12652", "replug", "retriever_name_or_path"),
    "retromae": Method("RetroMAE", "https://arxiv.org/abs/2205.12035", "retromae", "encoder_name_or_path"),
    "contriever": Method("Contriever", "https://arxiv.org/abs/2112.09118", "contriever"),
    "simcse": Method("SimCSE", "https://arxiv.org/abs/2104.08821", "unsupervised"),
    "tsdae": Method("TSDAE", "https://arxiv.org/abs/2104.06979", "unsupervised"),
    "dpr": Method("DPR", "https://arxiv.org/abs/2004.04906", **_JUDGED),
    "ance": Method("ANCE", "https://arxiv.org/abs/2007.00808", **_JUDGED),
    "distill": Method("distillation from a cross-encoder", "https://arxiv.org/abs/2205.12035", **_JUDGED),
}


def recipe(training: dict, base_model: str | None) -> str | None:
    """
    A recipe (YAML) of the options of a run that differ from their defaults; `None` where they are not known.

    Args:
        training: what `training_record.json` holds.
        base_model: Hub id of the model that it began with, where that is known.

    Returns:
        With a comment on top for each option that named a folder, which has to be given anew.
    """
    options = training.get("options")
    if not options:
        return None
    method = METHODS.get(training.get("method"))
    if method and base_model and method.base not in options:
        options = {method.base: base_model, **options}
    comments = [
        f"# Add --{name} {value}: it was a folder, which is not named here.\n"
        for name, value in _to_add(training, base_model).items()
    ]
    return "".join(comments) + yaml.safe_dump(options, sort_keys=False, allow_unicode=True)


def train_command(training: dict, base_model: str | None) -> str:
    """The command that trains by that recipe anew."""
    method = METHODS[training["method"]]
    words = [f"revela-hub train {method.script} recipe.yaml"]
    words += [f"--{name} {value}" for name, value in _to_add(training, base_model).items()]
    words.append("--output_dir run")
    if training.get("processes", 1) > 1:
        words.append(f"--num-processes {training['processes']}")
    return " ".join(words)


def prepare_command(training: dict) -> str | None:
    """The command that prepares the training text anew; `None` where it is not one set with an account of its own."""
    data = training.get("data", [])
    if len(data) != 1 or not data[0].get("settings"):
        return None
    words = ["revela-hub prepare", data[0].get("dataset") or "YOUR_TEXT", "--out prepared"]
    for key, value in data[0]["settings"].items():
        option = "--for" if key == "method" else f"--{key.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not False:
            words.append(f"{option} {value}")
    if "sequences" in data[0] and "tokenizer" not in data[0]["settings"]:
        words.append("--tokenizer YOUR_BASE_MODEL")
    return " ".join(words)


def _to_add(training: dict, base_model: str | None) -> dict[str, str]:
    """Options that the recipe cannot have -> what to put there."""
    method, options = METHODS.get(training.get("method")), training["options"]
    missing = {}
    if method and base_model is None and method.base not in options:
        missing[method.base] = "YOUR_BASE_MODEL"
    if method and method.data not in options:
        missing[method.data] = "prepared" if method.data == "train_sets" else "YOUR_DATA"
    others = (name for name in training.get("local_models", ()) if method is None or name != method.base)
    return missing | dict.fromkeys(others, "YOUR_MODEL")


__all__ = ["METHODS", "prepare_command", "recipe", "train_command"]
