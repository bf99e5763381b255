"""The model card of a published folder: `README.md`, its pictures, the recipe, and the results as the Hub has them."""

import csv
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hub_cards import results as measured
from hub_cards.checkpoints import EXPORT_RECORD, check_folder, model_type, require_whole, sha256
from hub_cards.privacy import check_private, hub_id, without_local_paths
from hub_cards.recipes import METHODS, prepare_command, recipe, train_command
from hub_cards.recorded import CHECK, is_same_model

CARD = "README.md"
RECIPE = "recipe.yaml"
TRAINING_RECORD = "training_record.json"
"""What a trainer leaves beside a checkpoint, and an export takes along: what a card says of the training."""

_TEMPLATES = Path(__file__).parent / "templates"
_METADATA = {
    "retriever": ("sentence-transformers", "sentence-similarity", ["feature-extraction", "dense-retrieval"]),
    "adapter": ("peft", "feature-extraction", ["lora", "dense-retrieval"]),
    "lm": ("transformers", "text-generation", []),
    "lm-adapter": ("peft", "text-generation", ["lora"]),
}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_POOLINGS = {"lasttoken": "eos", "cls_token": "cls", "mean_tokens": "mean"}
_UNITS = ("groups", "sequences")
# What a training record says that a licence and a language follow from.
_SOURCES = ("base_models", "local_models", "data")


def write_card(
    folder: str | Path,
    *,
    name: str | None = None,
    repo_id: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    language: Sequence[str] | None = None,
    datasets: Sequence[str] | None = None,
    origin: str | None = None,
    results: Sequence[str | Path] = (),
) -> Path:
    """
    Write the model card of a published folder: a retriever, an adapter or an LM.

    What was said before stays, unless it is said anew, and what is unknown is left out.

    Args:
        folder: what `export` wrote, or any folder of such files. What is known of the training is read from its
            `training_record.json`.
        name: what the model is called as long as it has no `repo_id`; the folder's name, if left out.
        repo_id: its id on the Hub, which the snippets then load.
        base_model: Hub id of the model that training began with; an adapter's config gets it as well.
        license: the Hub's short name of one, such as `apache-2.0`.
        language: ISO codes.
        datasets: Hub ids of what it was trained on.
        origin: a paragraph that says where the weights come from, for models of others.
        results: JSON files that `revela-hub evaluate --out` wrote; a task's new results replace its old ones.

    Returns:
        The path of the card.

    Raises:
        ValueError: for a folder that holds no published model or not the whole of one, results that are none of this
            model, an id that is none, and what must not be published (`hub_cards.privacy.check_private`).
    """
    folder = Path(folder)
    kind = _kind(folder)
    require_whole(folder)
    check_folder(folder)
    record = _read(folder / EXPORT_RECORD)
    given = {
        "repo_id": repo_id,
        "base_model": base_model,
        "license": license,
        "language": list(language or ()) or None,
        "datasets": list(datasets or ()) or None,
        "origin": origin,
    }
    facts = record.get("card", {}) | {key: value for key, value in given.items() if value is not None}
    for one in (facts.get("repo_id"), facts.get("base_model"), *facts.get("datasets", ())):
        _check_id(one)
    for path in results:
        read = measured.read_results(path, folder, facts.get("repo_id"))
        facts["results"] = facts.get("results", {}) | {read["task"]: read}
    record["card"] = facts
    training = _read(folder / TRAINING_RECORD)
    name = facts.get("repo_id") or name or folder.resolve().name

    staging = folder / ".card.partial"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        base_model = _named_base(folder, kind, facts, training)
        text = None if kind.startswith("lm") else recipe(training, base_model)
        if text is not None:
            (staging / RECIPE).write_text(text, encoding="utf-8")
        figures = _draw(training, staging, kind)
        card, entries = _render(folder, kind, name, facts, training, figures, base_model, text)
        for file, entry in entries.items():
            (staging / measured.EVAL_RESULTS).mkdir(exist_ok=True)
            (staging / measured.EVAL_RESULTS / file).write_text(_dump(entry), encoding="utf-8")
        card.save(staging / CARD)
        record["card_sha256"] = sha256(staging / CARD)
        check_private(staging)
        mine = [path.relative_to(staging) for path in staging.rglob("*") if path.is_file()]
        mine = {part.as_posix() for path in mine for part in (path, *path.parents[:-1])}
        if record.get("files"):
            record["files"] = sorted({*record["files"], *mine, EXPORT_RECORD})
        else:
            record["files"] = sorted({*mine, EXPORT_RECORD})
        (staging / EXPORT_RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        # The card itself last: with it the folder is whole.
        files = sorted((path for path in staging.rglob("*") if path.is_file()), key=lambda path: path.name == CARD)
        for path in files:
            target = folder / path.relative_to(staging)
            target.parent.mkdir(exist_ok=True)
            os.replace(path, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    if kind.endswith("adapter") and facts.get("base_model"):
        config = _read(folder / "adapter_config.json") | {"base_model_name_or_path": facts["base_model"]}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder / CARD


def check_card(folder: str | Path) -> None:
    """
    Whether the card of a folder may be published.

    Raises:
        ValueError: naming the first thing that is wrong: no card, metadata that cannot be read or lack what the Hub
            goes by, results that do not validate, a picture that is not there, or a local path, a machine's name or a
            token in any text of the folder.
    """
    folder = Path(folder)
    path = folder / CARD
    if not path.is_file():
        raise ValueError(f"{folder} has no {CARD}: write one with `revela-hub card {folder}`.")
    try:
        card = ModelCard.load(path)
        data = card.data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} is no model card: its metadata do not parse ({reason}): write it with `revela-hub card`."
        ) from error
    needed = ["library_name", "pipeline_tag", "tags"] + ["base_model"] * (folder / "adapter_config.json").exists()
    for field in needed:
        if not data.get(field):
            option = " --base-model ORG/NAME" if field == "base_model" else ""
            raise ValueError(f"{path} names no {field}: say it with `revela-hub card {folder}{option}`.")
    for field in ("base_model", "datasets"):
        value = data.get(field) or []
        for one in [value] if isinstance(value, str) else value:
            _check_id(one)
    for file in sorted((folder / measured.EVAL_RESULTS).glob("*.yaml")):
        measured.check_entries(file)
    for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", card.text):
        if "://" not in target and not (folder / target).is_file():
            raise ValueError(f"{path} shows {target}, which is not in the folder: write it with `revela-hub card`.")
    check_private(folder)


def is_as_written(folder: str | Path) -> bool:
    """Whether the card is what `write_card` wrote there, so that nothing of anyone's is lost by writing it anew."""
    path = Path(folder) / CARD
    return path.is_file() and _read(Path(folder) / EXPORT_RECORD).get("card_sha256") == sha256(path)


def said_before(earlier: Path, folder: Path) -> dict:
    """
    What people said of an export, as far as it holds of the one that is about to take its place.

    Results hold if both make the same embeddings, or likelihoods, of the texts of `revela_check.json`; licence,
    language and data sets if both were trained from the same base on the same text. It is said what is left out. The
    base model is taken over where the training does not tell.

    Args:
        earlier: a folder that need not be there.
        folder: the new export, without a card.

    Returns:
        What belongs under `card` in its `revela_export.json`.
    """
    facts = dict(_read(earlier / EXPORT_RECORD).get("card", {}))
    facts.pop("origin", None)  # of the weights that were there
    before, now = ({name: read_training_record(path).get(name) for name in _SOURCES} for path in (earlier, folder))
    if before != now:
        left = [name for name in ("license", "language", "datasets") if facts.pop(name, None)]
        if left:
            print(
                f"{earlier}: {', '.join(left)} were said of a model of another base or text and are left out of the "
                "card: say them again.",
                file=sys.stderr,
            )
    if _base_model(read_training_record(folder), _kind(folder)):
        facts.pop("base_model", None)
    if facts.get("results") and not is_same_model(_read(earlier / CHECK), _read(folder / CHECK)):
        print(
            f"{earlier}: the results of {', '.join(facts.pop('results'))} were measured on other weights and are left "
            "out of the card: evaluate again.",
            file=sys.stderr,
        )
    return facts


def was_edited(folder: str | Path) -> bool:
    """Whether someone wrote into the card after `write_card` did."""
    known = _read(Path(folder) / EXPORT_RECORD).get("card_sha256") is not None
    return known and (Path(folder) / CARD).is_file() and not is_as_written(folder)


def read_training_record(checkpoint: str | Path) -> dict:
    """What the trainer left beside a checkpoint; empty where it is of an earlier version."""
    return _read(Path(checkpoint) / TRAINING_RECORD)


def take_along(checkpoint: Path, folder: Path) -> None:
    """
    Put what is known of the training of a checkpoint into a published folder.

    The record of the trainer, the log's curves, and the energy that codecarbon measured, if it ran.
    """
    training = read_training_record(checkpoint) or _from_config(checkpoint)
    history = _read(checkpoint / "trainer_state.json").get("log_history", [])
    if history and "log_history" not in training:
        from hub_cards.figures import LOGGED

        entries = [{key: entry[key] for key in ("step", *LOGGED) if key in entry} for entry in history]
        training["log_history"] = [entry for entry in entries if len(entry) > 1]
    if energy := _energy(checkpoint):
        training["energy"] = energy
    text = json.dumps(without_local_paths(training), ensure_ascii=False)
    (folder / TRAINING_RECORD).write_text(text + "\n", encoding="utf-8")


def _from_config(checkpoint: Path) -> dict:
    config = _read(checkpoint / "config.json")
    names = ("retriever_name_or_path", "lm_name_or_path")
    bases = {name: config[name] for name in names if hub_id(config.get(name))}
    return {"method": model_type(checkpoint), "base_models": bases}


def _energy(checkpoint: Path) -> dict | None:
    """Sums over the parts of a run. codecarbon's file also says where on earth it was, which is nobody's business."""
    for file in (checkpoint / "emissions.csv", checkpoint.parent / "emissions.csv"):
        if file.is_file() and (file.parent == checkpoint or checkpoint.name.startswith("checkpoint-")):
            with file.open(encoding="utf-8", newline="") as lines:
                rows = list(csv.DictReader(lines))
            try:
                sums = {
                    key: sum(float(row[column]) for row in rows)
                    for key, column in (("kwh", "energy_consumed"), ("co2_kg", "emissions"))
                }
            except (KeyError, TypeError, ValueError):
                return None
            return {key: float(f"{value:.3g}") for key, value in sums.items()}
    return None


def _kind(folder: Path) -> str:
    if (folder / "modules.json").is_file():
        return "retriever"
    if (folder / "adapter_config.json").is_file():
        is_lm = _read(folder / "adapter_config.json").get("task_type") == "CAUSAL_LM"
        return "lm-adapter" if is_lm else "adapter"
    architectures = _read(folder / "config.json").get("architectures") or [""]
    if model_type(folder) not in ("revela", "retromae") and architectures[0].endswith("ForCausalLM"):
        return "lm"
    raise ValueError(f"{folder} is no published model: write one with `revela-hub export CHECKPOINT {folder}`.")


def _draw(training: dict, staging: Path, kind: str) -> dict[str, str]:
    """Pictures of the training by what they show: paths in the folder."""
    figures = {}
    if training.get("log_history") or training.get("in_batch_attention"):
        from hub_cards.figures import draw_attention, draw_curves

        (staging / "figures").mkdir()
        if draw_curves(training.get("log_history", []), staging / "figures" / "training.png"):
            figures["training"] = "figures/training.png"
        pictures = training.get("in_batch_attention", [])
        if pictures and kind == "retriever":
            draw_attention(pictures, staging / "figures" / "in_batch_attention.png")
            figures["attention"] = "figures/in_batch_attention.png"
    return figures


def _named_base(folder: Path, kind: str, facts: dict, training: dict) -> str | None:
    base_model = facts.get("base_model") or _base_model(training, kind)
    if kind.endswith("adapter"):
        base_model = base_model or hub_id(_read(folder / "adapter_config.json").get("base_model_name_or_path"))
    return base_model


def _render(
    folder: Path,
    kind: str,
    name: str,
    facts: dict,
    training: dict,
    figures: dict,
    base_model: str | None,
    recipe_text: str | None,
):
    method = METHODS.get(training.get("method"))
    datasets = facts.get("datasets") or [
        entry["dataset"] for entry in training.get("data", ()) if entry.get("dataset")
    ]
    library, pipeline, tags = _METADATA[kind]
    results = list(facts.get("results", {}).values())
    indexed, entries = measured.as_eval_results(results)
    data = ModelCardData(
        language=facts.get("language"),
        license=facts.get("license"),
        library_name=library,
        pipeline_tag=pipeline,
        tags=[library, pipeline, *tags, *([training["method"]] if method else [])],
        base_model=base_model,
        base_model_relation=_relation(kind, facts) if base_model else None,
        datasets=list(dict.fromkeys(datasets)) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in indexed)) or None,
        model_name=name.rpartition("/")[2] if indexed else None,
        eval_results=indexed or None,
    )
    parts = ("lm" if kind.startswith("lm") else kind, "training")
    template = "".join((_TEMPLATES / f"{part}.md").read_text(encoding="utf-8") for part in parts)
    card = ModelCard.from_template(
        data,
        template_str=template,
        kind=kind,
        name=name,
        title=name.rpartition("/")[2],
        method=method,
        cited=training.get("method"),
        base=base_model,
        origin=facts.get("origin"),
        model=_describe_retriever(folder) if kind == "retriever" else _read(folder / CHECK),
        training=training,
        data=[_describe_data(entry) for entry in training.get("data", ())],
        cost=_describe_cost(training),
        recipe=recipe_text if method else None,
        train=train_command(training, base_model) if method and recipe_text else None,
        prepare=prepare_command(training),
        figures=figures,
        tables=measured.tables(results, name.rpartition("/")[2], base_model),
    )
    # What a condition left out leaves blank lines.
    card.text = re.sub(r"\n{3,}", "\n\n", card.text)
    return card, entries


def _base_model(training: dict, kind: str) -> str | None:
    bases = training.get("base_models", {})
    retriever = (
        bases.get("retriever_name_or_path") or bases.get("encoder_name_or_path") or bases.get("model_name_or_path")
    )
    if not kind.startswith("lm"):
        return retriever
    # Without an LM of its own, a run takes the retriever's backbone for both.
    named = bases.get("lm_name_or_path")
    return named or (None if "lm_name_or_path" in training.get("local_models", ()) else retriever)


def _relation(kind: str, facts: dict) -> str | None:
    if kind.endswith("adapter"):
        return "adapter"
    # What others trained and we only put into our format may be the very weights of its base.
    return None if facts.get("origin") else "finetune"


def _describe_retriever(folder: Path) -> dict:
    from safetensors import safe_open

    config = _read(folder / "config.json")
    pooling = _read(folder / "1_Pooling" / "config.json")
    settings = _read(folder / "config_sentence_transformers.json")
    used = [name for name in _POOLINGS if pooling.get(f"pooling_mode_{name}")]
    parameters, dtypes = 0, set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as weights:
            for key in weights.keys():
                part = weights.get_slice(key)
                size = 1
                for length in part.get_shape():
                    size *= length
                parameters += size
                dtypes.add(_DTYPES.get(part.get_dtype(), part.get_dtype()))
    prompts = settings.get("prompts") or {}
    return {
        "pooling": _POOLINGS[used[0]] if used else None,
        "query_prompt": prompts.get("query", ""),
        "document_prompt": prompts.get("document", ""),
        "max_length": _read(folder / "sentence_bert_config.json").get("max_seq_length"),
        "dimension": pooling.get("word_embedding_dimension"),
        "parameters": _about(parameters) if parameters else None,
        "dtype": " and ".join(sorted(dtypes)),
        "normalize": config.get("revela", {}).get("normalize", settings.get("similarity_fn_name") == "cosine"),
        "remote": "AutoModel" in (config.get("auto_map") or {}),
        "masked_lm": (config.get("architectures") or [""])[0].endswith("ForMaskedLM"),
    }


def _describe_data(entry: dict) -> dict:
    settings = entry.get("settings", {})
    unit = next((unit for unit in _UNITS if unit in entry), None)
    described = {"dataset": entry.get("dataset"), "sha256": entry.get("sha256")}
    if "pairs" in entry:
        pairs = f"{entry['pairs']:,} pairs of a query and a relevant document"
        return described | {"counts": f"{pairs}, {entry['corpus']:,} documents"}
    if unit is None:
        return described
    documents = entry.get("documents", {})
    parts = [f"{documents.get('train', 0):,} documents ({documents.get('validation', 0):,} more held out)"]
    if unit == "groups":
        parts.append(f"{entry['groups']['train']['groups']:,} groups of {settings['group_size']} chunks")
        parts.append(f"at most {settings['max_words']} words a chunk")
    else:
        parts.append(f"{entry['sequences']['train']:,} sequences of at most {settings['max_seq_length']} tokens")
    return described | {"counts": ", ".join(parts)}


def _describe_cost(training: dict) -> str | None:
    """Hardware, time, tokens and energy as one sentence; `None` where no trainer wrote them down."""
    if "device" not in training:
        return None
    processes = training["processes"]
    steps = f"{training['step']:,} steps"
    if training.get("weights_of_step", training["step"]) != training["step"]:
        steps += f" (the weights are those of step {training['weights_of_step']:,}, the best on held-out text)"
    parts = [steps, _duration(training["seconds"])]
    if training.get("tokens"):
        parts.append(f"about {_about(training['tokens'])} tokens")
    where = training["device"] if processes == 1 else f"{processes} processes, each with {training['device']}"
    sentence = f"{', '.join(parts)} on {where}"
    if energy := training.get("energy"):
        sentence += f"; {energy['kwh']} kWh and {energy['co2_kg']} kg CO₂ by codecarbon's measure"
    return sentence + "."


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _about(count: float) -> str:
    for size, unit in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def _check_id(name: str | None) -> None:
    if name is None:
        return
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(
            f"{name!r} is no id on the Hub (org/name): a card names models and data by theirs."
        ) from error
    if name.startswith((".", "/", "~")):
        raise ValueError(f"{name!r} is a local path, and no id on the Hub (org/name).")


def _dump(value) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def _read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


__all__ = [
    "CARD",
    "RECIPE",
    "TRAINING_RECORD",
    "check_card",
    "is_as_written",
    "read_training_record",
    "said_before",
    "take_along",
    "was_edited",
    "write_card",
]
