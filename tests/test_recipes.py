"""Every shipped recipe and launch config is read by what will read it, and says what it is for."""

import json
import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from trainers.arguments import parse_recipe
from trainers.revela import DataArguments, ModelArguments
from trainers.revela_trainer import RevelaTrainingArguments

TRAINERS = Path(__file__).parent.parent / "trainers"
RECIPES = sorted((TRAINERS / "recipes").glob("revela-*.yaml"))
RETRIEVERS = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
}
# The paper's tables of Revela results, but for Table 2, whose Revela is that of Tables 1 and 6, and the per-task
# tables of the same runs (8 and 9).
TABLES = {1, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17}


def parse(path: Path, *overrides: str):
    # A machine without a GPU refuses bf16 unless it is told to use the CPU.
    classes = (ModelArguments, DataArguments, RevelaTrainingArguments)
    return parse_recipe(classes, [str(path), "--use_cpu", "true", *overrides])


def tables(path: Path) -> set[int]:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    title = re.match(r"# Tables? ([\d, and]+) \(", first)
    assert title, f"{path.name} does not begin with the table it is for: {first}"
    return {int(number) for number in re.findall(r"\d+", title[1])}


@pytest.mark.parametrize("path", sorted((TRAINERS / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipe_parses_to_what_it_says(path):
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    # The demo makes its backbone and says on the command line where it lies.
    missing = [] if "retriever_name_or_path" in recipe else ["--retriever_name_or_path", "made/on/the/spot"]
    model, data, training = parse(path, *missing)
    for name, value in recipe.items():
        owners = [config for config in (model, data, training) if hasattr(config, name)]
        assert len(owners) == 1, name
        parsed = getattr(owners[0], name)
        # transformers turns names into enums, and "none" into no one to report to.
        assert getattr(parsed, "value", parsed) == ([] if value == "none" else value), name
    assert path not in RECIPES or training.output_dir == f"runs/{path.stem}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_holds_the_settings_of_the_paper(path):
    model, data, training = parse(path)
    assert model.retriever_lora_r == model.lm_lora_r == 256
    assert (model.temperature, model.similarity_dtype, model.in_batch_gate) == (1e-4, "bfloat16", False)
    assert (model.query_prompt, model.document_prompt) == ("query: ", "passage: ")
    assert (training.learning_rate, training.warmup_steps, training.lr_scheduler_type) == (1e-4, 100, "linear")
    assert 4 * training.gradient_accumulation_steps * training.per_device_train_batch_size == 32
    assert training.bf16 and data.max_length == 160
    # One epoch: 320,000 groups of prose, 358,763 of code (§4.1, C.4, C.5).
    on_code = path.stem.endswith("-code")
    assert training.max_steps == (358_763 // 32 if on_code else 320_000 // 32)
    # §B.5: V-normalisation and the first half for Wikipedia, neither for code.
    assert (model.v_norm, model.similarity_span) == ((False, "full") if on_code else (True, "first_half"))
    large = model.retriever_name_or_path in (RETRIEVERS["llama-3.2-3b"], RETRIEVERS["llama-3.1-8b"])
    assert data.group_size == (8 if large else 4 if "group-size" in path.stem else 16)


def test_recipes_cover_each_table_and_retriever():
    assert set().union(*map(tables, RECIPES)) == TABLES
    names = {path.stem for path in RECIPES}
    for retriever in RETRIEVERS:
        assert f"revela-{retriever}-wikipedia" in names
        # The paper trains its 8B retriever on Wikipedia only (§4.1).
        assert (f"revela-{retriever}-code" in names) == (retriever != "llama-3.1-8b")
    for path in RECIPES:
        named = [key for key in RETRIEVERS if key in path.stem]
        model, _, _ = parse(path)
        assert model.retriever_name_or_path == RETRIEVERS[named[0] if named else "llama-3.2-1b"]
        expected = RETRIEVERS["smollm2-135m" if "lm-size" in path.stem else "llama-3.2-1b"]
        assert model.lm_name_or_path == expected


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_overrides_and_commands_in_comments_hold(path):
    comments = [line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert f"revela-hub train revela {path.stem} --launch-config zero3" in comments
    for line in comments:
        if line.startswith("--"):
            parse(path, *line.split())


def test_command_line_wins_over_recipe():
    model, data, training = parse(RECIPES[0], "--temperature", "0.01", "--train_sets", "a", "b", "--max_steps", "7")
    assert (model.temperature, data.train_sets, training.max_steps) == (0.01, ["a", "b"], 7)


def test_unknown_field_is_an_error(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("retriever_name_or_path: a\noutput_dir: b\ntemprature: 1.0e-4\n")
    with pytest.raises(ValueError, match="'temprature'"):
        parse(recipe)


@pytest.mark.parametrize("path", sorted((TRAINERS / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_config_is_read_by_accelerate(path):
    config = load_config_from_file(str(path))
    kind = {"single": "NO", "cpu": "NO", "ddp": "MULTI_GPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}[path.stem]
    assert config.distributed_type.value == kind
    assert config.use_cpu == (path.stem == "cpu")
    assert config.num_processes == (1 if kind == "NO" else 4)
    # Precision and accumulation come from the recipe; a second place for them could only disagree.
    assert config.mixed_precision == "no"
    assert "gradient_accumulation_steps" not in config.deepspeed_config
    if kind == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])
        # accelerate resolves a config file against the current folder, which from a wheel is anywhere.
        assert "deepspeed_config_file" not in config.deepspeed_config


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_config_leaves_the_recipe_its_values(stage):
    config = json.loads((TRAINERS / "deepspeed" / f"zero{stage}.json").read_text(encoding="utf-8"))
    assert config["zero_optimization"]["stage"] == stage
    assert config["bf16"] == {"enabled": "auto"}
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert config[name] == "auto"
    # Without it a ZeRO-3 checkpoint holds no weights.
    assert stage == 2 or config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]
