"""
`revela-hub`: raw text in, a published dense retriever out.

    revela-hub prepare docs/ --out prepared/                     # text -> groups of chunks
    revela-hub train revela my-recipe.yaml --output_dir run/     # groups -> checkpoint; or: train retromae
    revela-hub export run/ retriever/                            # checkpoint -> sentence-transformers folder
    revela-hub evaluate retriever/ --task beir-folder/           # nDCG@10 and more, side by side
    revela-hub search retriever/ docs/ "how do I open a file?"
    revela-hub embed retriever/ docs/ --out embeddings/          # a corpus -> shards of embeddings, on many devices

The commands import what they need when they run, so that `--help` answers at once.
"""

import dataclasses
import inspect
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, get_type_hints

import typer
from typer.core import TyperGroup

from hub_cards.checkpoints import model_type
from hub_cards.commands import publishing
from hub_cards.console import quiet
from hub_cards.hub import one_line, require_here_or_hub
from trainers.launching import LAUNCH_CONFIGS, Launch, is_launched, run_launched

HERE = Path(__file__).resolve().parent
RECIPES = HERE / "trainers" / "recipes"
# What the help says of the scripts in trainers/, and how the example of each begins.
METHODS = {
    "revela": (
        "Revela: in-batch attention weighted by the retriever, trained by the LM's loss.",
        "revela-smollm2-135m-wikipedia --train_sets prepared/",
    ),
    "retromae": (
        "RetroMAE: a masked auto-encoder whose decoder has little but the embedding to go by.",
        "retromae-bert-base-wikipedia-bookcorpus --train_sets prepared/",
    ),
    "finetune": (
        "Fine-tune an encoder or a retriever on queries with relevant documents: dpr, ance, distill.",
        "finetune-msmarco-dpr --model_name_or_path bert-base-uncased --train_set msmarco/",
    ),
    "replug": (
        "The rival that distils a frozen LM: which chunk of a group makes which more likely.",
        "replug-smollm2-135m-wikipedia --train_sets prepared/",
    ),
    "contriever": (
        "The contrastive rival: inverse cloze and crops of the same prepared text.",
        "contriever-llama-3.2-1b-wikipedia --train_sets prepared/",
    ),
    "unsupervised": (
        "SimCSE and TSDAE of sentence-transformers on the same prepared text.",
        "simcse-bert-base-wikipedia --train_sets prepared/",
    ),
}


class OneLineErrors(TyperGroup):
    """Says what went wrong in one line and exits with 2; `--debug` or REVELA_DEBUG=1 shows the traceback."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            if ctx.params["debug"]:
                raise
            typer.echo(f"error: {one_line(error)}", err=True)
            raise typer.Exit(2) from None


# Plain help: rich's panels leave the texts a column of twenty characters on a common terminal.
app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
train_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

# What is not an option of the command here belongs to what it calls, --help included.
FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True}


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("revela-hub"))
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="REVELA_DEBUG", help="Show the whole traceback of an error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train a dense retriever from raw text, publish it, and use it anywhere.

    The usual order: prepare, train, export, evaluate, search. Each has its own --help with an example.
    """
    if not debug:
        quiet()


@app.command("prepare", context_settings=FORWARD, add_help_option=False)
def prepare_text(ctx: typer.Context) -> None:
    """Cut raw text into what a method trains on: groups of chunks, or sequences."""
    from trainers.data.prepare import PrepareConfig, prepare

    def run(**options) -> None:
        """Cut raw text into what a method trains on: groups of chunks for Revela, sequences for RetroMAE.

        SOURCE is a file (JSONL, Parquet, CSV, TSV or text, also with .gz), a folder of such, of pages or of source
        code, or the id of a Hub dataset. MS MARCO's and DPR's files are read as distributed. OUT becomes a folder of
        Parquet shards, a share of the documents held out for validation.

        \b
        revela-hub prepare docs/ --out prepared/
        revela-hub prepare posts.jsonl --text-column body --out prepared/ --on-error skip
        revela-hub prepare src/ --include "*.py" --out prepared/ --validation-share 0.05
        revela-hub prepare docs/ --for retromae --tokenizer bert-base-uncased --out prepared/
        """
        config = PrepareConfig(**options)
        try:
            summary = prepare(config)
        except KeyboardInterrupt:
            typer.echo(f"error: interrupted, so nothing was written to {config.out}.", err=True)
            raise typer.Exit(130) from None
        typer.echo(f"Next: {shlex.join(_next_command(config, summary))}")

    _run_fields(ctx, run, PrepareConfig, arguments=("source",))


def _next_command(config, summary: dict) -> list[str]:
    """What trains on a set that `prepare` has just made, with all that it needs."""
    is_revela = config.method == "revela"
    if is_revela:
        options = ["small-run", "--retriever_name_or_path", "HuggingFaceTB/SmolLM2-135M"]
    else:
        options = [METHODS["retromae"][1].split()[0], "--encoder_name_or_path", config.tokenizer]
        options += ["--max_seq_length", str(config.max_seq_length)]
    if is_revela and not summary["chunks"]["validation"]:
        # The recipe picks the best checkpoint on held-out documents.
        options += ["--eval_strategy", "no", "--load_best_model_at_end", "false"]
    command = ["revela-hub", "train", config.method, *options]
    return [*command, "--train_sets", config.out, "--output_dir", "run"]


def _run_fields(ctx: typer.Context, function: Callable, *classes: type, arguments: Sequence[str]) -> None:
    """Runs a function whose options are the fields of dataclasses, on what follows the command."""
    _take_fields(function, *classes, arguments=arguments)
    command = typer.Typer(add_completion=False, rich_markup_mode=None)
    command.command()(function)
    if code := typer.main.get_command(command)(ctx.args, prog_name=ctx.command_path, standalone_mode=False):
        raise typer.Exit(code)


def _take_fields(function: Callable, *classes: type, arguments: Sequence[str] = ()) -> None:
    """Makes the fields of dataclasses the options of a command, with their help; `arguments` names the positional."""
    own = inspect.signature(function).parameters.values()
    parameters = [parameter for parameter in own if parameter.kind != inspect.Parameter.VAR_KEYWORD]
    for config_class in classes:
        hints = get_type_hints(config_class)
        for field in dataclasses.fields(config_class):
            if field.name in arguments:
                info = typer.Argument(help=field.metadata["help"])
            else:
                names = [field.metadata["option"]] if "option" in field.metadata else []
                info = typer.Option(*names, help=field.metadata["help"])
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            annotation = Annotated[hints[field.name], info]
            parameters.append(
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


@train_app.callback(invoke_without_command=True)
def train(
    list_recipes: Annotated[
        bool, typer.Option("--list", help="List the shipped recipes and the table of the paper each is for.")
    ] = False,
) -> None:
    """Train a retriever: accelerate launch on the method's script.

    Pick the method, then a recipe: a YAML file of your own or a shipped name. "train METHOD --help" lists every field.
    """
    if list_recipes:
        recipes = sorted(RECIPES.glob("*.yaml"), key=lambda path: path.stem)
        width = max(len(path.stem) for path in recipes)
        for path in recipes:
            with path.open(encoding="utf-8") as lines:
                typer.echo(f"{path.stem:<{width}}  {next(lines).lstrip('# ').rstrip()}")
        raise typer.Exit


def _add_method(method: str, text: str) -> None:
    def run(ctx: typer.Context, help: Annotated[bool, typer.Option("--help")] = False, **launch) -> None:
        _launch(method, ctx.args, Launch(**launch), help)

    _take_fields(run, Launch)
    train_app.command(method, context_settings=FORWARD, add_help_option=False, short_help=text)(run)


for _method, (_text, _) in METHODS.items():
    _add_method(_method, _text)


LAUNCH_HELP = """\
usage: revela-hub train {method} [RECIPE] [--field value ...] [--launch-config NAME] [--num-processes N]

launching:
  --launch-config NAME  How to launch: {configs}, or an accelerate YAML file. Left out: your own
                        `accelerate config` where there is one, otherwise what fits this machine.
  --num-processes N     Processes in all, one a device, on all machines together; overrides the launch config.
  --num-machines N --machine-rank K --main-process-ip ADDRESS --main-process-port PORT
                        Several machines: the same command on each, K counting from 0, ADDRESS and PORT those of
                        machine 0. The output folder has to be one that all of them see.

example:
  revela-hub train {method} {example} --output_dir run/ --max_steps 200

The rest is the script's own:
"""


def _launch(method: str, arguments: list[str], launch: Launch, wants_help: bool) -> None:
    script = HERE / "trainers" / f"{method}.py"
    if wants_help:
        configs = ", ".join(sorted(path.stem for path in LAUNCH_CONFIGS.glob("*.yaml")))
        typer.echo(LAUNCH_HELP.format(method=method, configs=configs, example=METHODS[method][1]))
        raise typer.Exit(subprocess.run([sys.executable, script, "--help"]).returncode)
    if arguments and not arguments[0].startswith("-"):
        from trainers.arguments import read_recipe

        read_recipe(arguments[0])
    command, on_cpu = launch.command(script)
    if on_cpu and not any(argument.partition("=")[0] == "--use_cpu" for argument in arguments):
        # A recipe with bf16 is refused on a machine without a GPU unless the CPU is asked for.
        arguments = [*arguments, "--use_cpu", "true"]
    raise typer.Exit(run_launched([*command, *arguments]))


app.add_typer(train_app, name="train")


@app.command("export")
def export_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="What training wrote: run/ or run/checkpoint-500/.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Write the LoRA adapter alone, for peft, as the authors release it.")
    ] = False,
    part: Annotated[
        str,
        typer.Option(help="retriever, or Revela's lm: the LM that was trained along, as a stock causal LM."),
    ] = "retriever",
    pooling: Annotated[
        str | None, typer.Option(help="RetroMAE: cls or mean, instead of what it was trained with.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Precision of the written weights: float32, bfloat16, float16.")
    ] = "float32",
    max_length: Annotated[
        int, typer.Option(min=1, help="Tokens that a text may have; less where the backbone has fewer positions.")
    ] = 2048,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT where it is an earlier export and nothing else.")
    ] = False,
) -> None:
    """Turn a checkpoint into a retriever that anyone loads.

    OUT is a sentence-transformers folder with the adapter merged into the stock backbone: SentenceTransformer(OUT) and
    AutoModel.from_pretrained(OUT) give the same embeddings, without this package. RetroMAE's is its encoder, whose
    masked-LM head AutoModelForMaskedLM finds there too. Of a fine-tuned retriever it is what card and push take.

    \b
    revela-hub export run/ retriever/
    revela-hub export run/checkpoint-500/ adapter/ --adapter-only
    revela-hub export run/ lm/ --part lm
    revela-hub export run/ lm-adapter/ --part lm --adapter-only
    """
    from hub_cards.export import export

    options = {"dtype": dtype, "max_length": max_length, "overwrite": overwrite}
    export(checkpoint, out, adapter_only=adapter_only, part=part, pooling=pooling, **options)
    typer.echo(f"Wrote {out}\nIts card: {out / 'README.md'}. Add results and a licence with revela-hub card {out}.")


def evaluate_models(
    models: Annotated[
        list[str],
        typer.Argument(help="sentence-transformers folders or Hub ids, or checkpoints that training wrote."),
    ],
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="A local folder in BEIR's format (corpus.jsonl, queries.jsonl, qrels/test.tsv), or the name of an "
            "mteb task or benchmark: NanoBEIR, CoIR, BRIGHT, SciFact, or retromae-beir for MS MARCO, NQ and the other "
            "sets of RetroMAE's Table 1. Names may be given several times."
        ),
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(
            help="A prepared folder: measures without labels, by how well a chunk's first half finds the other chunks "
            "of its held-out document and, for checkpoints, by how much the retriever helps the LM (retrieval gain)."
        ),
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(
            help="A benchmark of the papers, with their settings: coir, bright, beir, retromae-beir, msmarco or nq. "
            "The same command goes on where one was stopped; accelerate starts the processes, as for train."
        ),
    ] = None,
    results: Annotated[
        Path, typer.Option(help="With --benchmark: folder that keeps the results of each task, and mteb's own files.")
    ] = Path("results"),
    mteb_name: Annotated[
        str | None, typer.Option(help="With --benchmark: org/name that a local model has in mteb's files.")
    ] = None,
    baseline: Annotated[
        list[str] | None, typer.Option(help="A model to compare with; may be given several times.")
    ] = None,
    bm25: Annotated[bool, typer.Option(help="Show BM25 as a row. Local folders only.")] = True,
    standardise: Annotated[
        bool,
        typer.Option(
            help="Show each model also with embeddings standardised per dimension, a free gain that training must "
            "beat. Local folders and --groups only."
        ),
    ] = False,
    truncate_dim: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Show each model also with embeddings cut to so many dimensions, as one trained with "
            "--matryoshka_dims allows; may be given several times.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file as well.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts a forward pass.")] = 32,
    split: Annotated[
        str | None, typer.Option(help='Which split; "test" of a local task and "validation" of --groups, if left out.')
    ] = None,
    gain_groups: Annotated[
        int, typer.Option(min=1, help="With --groups: held-out groups, at most, that the retrieval gain is taken on.")
    ] = 64,
    max_length: Annotated[
        int, typer.Option(min=2, help="With --groups: tokens a chunk may have for the retrieval gain, as in training.")
    ] = 160,
    **launch,
) -> None:
    """Measure retrievers side by side: nDCG@10, MRR@10, Recall@10, @50, @100 and @1000.

    \b
    revela-hub evaluate retriever/ --task beir-folder/ --baseline sentence-transformers/all-MiniLM-L6-v2
    revela-hub evaluate retriever/ --task NanoBEIR --out results.json
    revela-hub evaluate retriever/ --task beir-folder/ --truncate-dim 64 --truncate-dim 128
    revela-hub evaluate run/checkpoint-500/ run/checkpoint-1000/ --groups prepared/
    revela-hub evaluate retriever/ --benchmark coir --num-processes 8 --out coir.json
    """
    if bool(task) + (groups is not None) + (benchmark is not None) != 1:
        raise ValueError("Give one of --task (with labels), --groups (without) and --benchmark (of the papers).")
    if benchmark is not None:
        if baseline or standardise or truncate_dim or split is not None:
            raise ValueError(
                "--benchmark takes models alone: no --baseline, --standardise, --truncate-dim or --split."
            )
        options = {"results": results, "mteb_name": mteb_name, "out": out, "batch_size": batch_size}
        _run_benchmark(models, benchmark, options, Launch(**launch))
        return
    if Launch(**launch) != Launch():
        raise ValueError("Several processes, and how to launch them, are for --benchmark alone.")
    from hub_cards.evaluation import evaluate, evaluate_groups

    baselines = baseline or []
    for name in [*models, *baselines]:
        require_here_or_hub(name)
    with tempfile.TemporaryDirectory() as folder:
        exported = _export_checkpoints([*baselines, *models], Path(folder))
        shown = {name: exported.get(name, name) for name in models}
        options = {
            "baselines": {name: exported.get(name, name) for name in baselines},
            "standardise": {name: exported.get(name, name) for name in [*baselines, *models]} if standardise else (),
            "truncate_dims": truncate_dim or (),
            "out": out,
            "batch_size": batch_size,
        }
        if groups is None:
            evaluate(shown, task[0] if len(task) == 1 else task, bm25=bm25, split=split or "test", **options)
        else:
            split = split or "validation"
            with_lm = [name for name in exported if model_type(name) == "revela"]
            gains = {name: _retrieval_gain(name, groups, split, gain_groups, max_length) for name in with_lm}
            evaluate_groups(shown, groups, gains=gains, split=split, **options)


_take_fields(evaluate_models, Launch)
app.command("evaluate")(evaluate_models)


def _run_benchmark(models: list[str], benchmark: str, options: dict, launch: Launch) -> None:
    from hub_cards.benchmarks import check_benchmark, run_benchmark

    if is_launched():
        run_benchmark(models, benchmark, options.pop("results"), **options)
        return
    check_benchmark(models, benchmark, options["mteb_name"], options["out"])
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    raise typer.Exit(
        launch.run(HERE / "revela_hub.py", ["evaluate", f"--benchmark={benchmark}", *given, "--", *models])
    )


def _export_checkpoints(names: Iterable[str], folder: Path) -> dict[str, str]:
    """Publishes into `folder` those of the names that are training checkpoints; returns name -> published folder."""
    published = {}
    for name in names:
        if model_type(name) in ("revela", "retromae"):
            from hub_cards.export import export

            published[name] = str(folder / str(len(published)))
            export(name, published[name], card=False)
    return published


def _retrieval_gain(checkpoint: str, groups: Path, split: str, num_groups: int, max_length: int) -> dict:
    import torch
    from transformers import AutoTokenizer

    from hub_cards.export import lm_tokenizer
    from hub_cards.validation import retrieval_gain
    from modeling_revela import RevelaForPreTraining
    from trainers.data.collator import GroupCollator
    from trainers.data.prepared import load_groups

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = RevelaForPreTraining.from_pretrained(checkpoint).to(device)
    collator = GroupCollator(
        AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False),
        lm_tokenizer(checkpoint),
        max_length=max_length,
        retriever_max_length=max_length,
        query_prompt=model.config.query_prompt,
        document_prompt=model.config.document_prompt,
        similarity_span=model.config.similarity_span,
        similarity_span_ratio=model.config.similarity_span_ratio,
    )
    rows = load_groups(groups, split)
    batches = (collator([rows[index]]).items() for index in range(min(len(rows), num_groups)))
    with torch.inference_mode():
        return retrieval_gain(model, ({name: tensor.to(device) for name, tensor in batch} for batch in batches))


@app.command("search")
def search_corpus(
    model: Annotated[str, typer.Argument(help="A sentence-transformers folder or Hub id.")],
    corpus: Annotated[
        Path, typer.Argument(help="What to search: text files or a folder of them, a BEIR folder, JSONL.")
    ],
    query: Annotated[str, typer.Argument(help="What to search for, in quotes.")],
    top_k: Annotated[int, typer.Option(min=1, help="Passages to show.")] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Passages a forward pass.")] = 32,
) -> None:
    """Print the passages of a corpus nearest to a query.

    The corpus is encoded anew at each call, so this is for trying a model, not for serving one.

    \b
    revela-hub search retriever/ docs/ "how do I open a file?"
    """
    from hub_cards.search import print_hits, search

    print_hits(search(model, corpus, query, top_k=top_k, batch_size=batch_size))


@app.command("embed", context_settings=FORWARD, add_help_option=False)
def embed_corpus(ctx: typer.Context) -> None:
    """Write a corpus's embeddings as shards, on any number of devices."""
    from hub_cards.embed import EmbedConfig, embed

    def run(**options) -> None:
        """Write a corpus's embeddings as shards of Parquet or NumPy, on any number of devices.

        OUT becomes a folder of shards, in the corpus's order, and embed.json, which says what was embedded with what.
        The same command again goes on where a run was stopped. accelerate starts the processes, as for train.

        \b
        revela-hub embed retriever/ docs/ --out embeddings/
        revela-hub embed retriever/ corpus.jsonl --out embeddings/ --num-processes 8 --dtype bfloat16
        """
        launch = Launch(**{field.name: options.pop(field.name) for field in dataclasses.fields(Launch)})
        config = EmbedConfig(**options)
        if is_launched():
            embed(config)
            return
        raise typer.Exit(launch.run(HERE / "revela_hub.py", ["embed", *ctx.args]))

    _run_fields(ctx, run, EmbedConfig, Launch, arguments=("model", "corpus"))


app.add_typer(publishing)

if __name__ == "__main__":
    app()
