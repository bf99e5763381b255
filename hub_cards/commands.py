"""The commands of `revela-hub` that publish and compare; `revela_hub.py` holds the others and adds these."""

from pathlib import Path
from typing import Annotated

import typer

publishing = typer.Typer(rich_markup_mode=None)


@publishing.command("card")
def write_model_card(
    folder: Annotated[Path, typer.Argument(help="What `revela-hub export` wrote.")],
    results: Annotated[
        list[Path] | None,
        typer.Option(help="JSON that `revela-hub evaluate --out` wrote; may be given several times, once a task."),
    ] = None,
    repo_id: Annotated[str | None, typer.Option(help="Its id on the Hub, org/name, for the snippets.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the model that training began with, where it was a local folder.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="The Hub's name of a licence, such as apache-2.0.")] = None,
    language: Annotated[
        list[str] | None, typer.Option(help="ISO code, such as en; may be given several times.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Hub id of the training text; may be given several times.")
    ] = None,
) -> None:
    """Write the model card of a published folder: README.md, its pictures, and the results.

    `export` has written one already; this adds what only you know, and results. What was said before stays, what is
    unknown is left out, and no local path, machine's name or token is let through.

    \b
    revela-hub evaluate retriever/ --task beir-folder/ --baseline HuggingFaceTB/SmolLM2-135M --out results.json
    revela-hub card retriever/ --results results.json --license apache-2.0 --language en
    """
    from hub_cards.card import write_card

    path = write_card(
        folder,
        repo_id=repo_id,
        base_model=base_model,
        license=license,
        language=language,
        datasets=dataset,
        results=results or (),
    )
    typer.echo(f"Wrote {path}")


@publishing.command("push")
def push_folder(
    folder: Annotated[Path, typer.Argument(help="What `revela-hub export` wrote: a retriever, an adapter or a LM.")],
    name: Annotated[str, typer.Argument(help="Its name on the Hub, org/name; made where it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="Make it private.")] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch to commit to, made where it is not there; main, if left out.")
    ] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request, also where others own the repository.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the folder and show what would be sent; the Hub is not asked.")
    ] = False,
) -> None:
    """Put a published folder on the Hub, checked, in one commit.

    First the folder is loaded in all its ways and compared with what the export recorded; pickles, stray files, paths
    of this machine and code that is not ours are refused. The same command again goes on where one was stopped. It
    needs a token that writes: `hf auth login`, or HF_TOKEN.

    \b
    revela-hub push retriever/ me/my-retriever --dry-run
    revela-hub push retriever/ me/my-retriever --private
    """
    from hub_cards.push import push

    url = push(folder, name, private=private, revision=revision, create_pr=create_pr, dry_run=dry_run)
    typer.echo("Nothing was sent: a dry run." if url is None else url)


@publishing.command("pull-check")
def check_pulled(
    name: Annotated[str, typer.Argument(help="A model on the Hub that `revela-hub push` put there, org/name.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; main, if left out.")] = None,
) -> None:
    """Load a model from the Hub in all its ways, and compare with what its export recorded.

    \b
    revela-hub pull-check me/my-retriever --revision v1
    """
    from hub_cards.push import pull_check

    for door, distance in pull_check(name, revision).items():
        typer.echo(f"{door}: as recorded (off by {distance:.1g})")


@publishing.command("serve-check")
def serve_check(folder: Annotated[Path, typer.Argument(help="A published folder.")]) -> None:
    """Say whether text-embeddings-inference and vLLM serve a folder as it is, and what to tell them.

    Told from the files by the servers' own rules; nothing is started. The exit code is 1 where neither takes it.

    \b
    revela-hub serve-check retriever/
    """
    from hub_cards.serving import check_serving

    verdicts = check_serving(folder)
    for verdict in verdicts:
        typer.echo(f"{verdict.server}: {'yes' if verdict.serves else 'no'}")
        for text in (*verdict.problems, *verdict.notes):
            typer.echo(f"  {text}")
    if not any(verdict.serves for verdict in verdicts):
        raise typer.Exit(1)


@publishing.command("export-onnx")
def write_onnx(
    folder: Annotated[Path, typer.Argument(help="A published folder, which gets onnx/model.onnx.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier onnx/, or openvino/.")] = False,
    openvino: Annotated[
        bool, typer.Option("--openvino", help='Write openvino/openvino_model.xml instead, for backend="openvino".')
    ] = False,
) -> None:
    """Write the model as ONNX into its folder, for sentence-transformers' backend="onnx", onnxruntime and TEI on CPUs.

    Needs pip install "revela-hub[onnx]", or "revela-hub[openvino]" with --openvino. What it gives is compared with
    torch before it is written.

    \b
    revela-hub export-onnx retriever/
    revela-hub export-onnx retriever/ --openvino
    """
    from hub_cards.onnx_export import export_onnx

    typer.echo(f"Wrote {export_onnx(folder, overwrite, openvino)}")


@publishing.command("import")
def import_released(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of a PEFT adapter, masked LM, encoder or LLM.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    base: Annotated[
        str | None, typer.Option(help="The LLM, folder or Hub id, of an adapter, instead of the one that it names.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of SOURCE on the Hub.")] = None,
    pooling: Annotated[
        str | None, typer.Option(help="eos, cls or mean. Left out: eos, and cls for a masked LM or encoder.")
    ] = None,
    query_prompt: Annotated[
        str | None, typer.Option(help='Before a query. Left out: "query: ", and nothing for a masked LM or encoder.')
    ] = None,
    document_prompt: Annotated[
        str | None, typer.Option(help='Before a text. Left out: "passage: ", and nothing for a masked LM or encoder.')
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Rank by cosine or by inner product. Left out: cosine, and the latter for a masked LM or encoder.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Precision of the written weights: float32, bfloat16, float16.")
    ] = "float32",
    max_length: Annotated[
        int, typer.Option(min=1, help="Tokens that a text may have; less where the model has fewer positions.")
    ] = 2048,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT where it is an earlier export and nothing else.")
    ] = False,
) -> None:
    """Turn a retriever that others released into the format that export writes.

    SOURCE is Revela's, RepLLaMA's or Tevatron's PEFT adapter, which is merged into its base model, or an encoder such
    as RetroMAE's, or a sentence-transformers folder, which says itself how it embeds. Of others say how they
    embed where that is not the usual for their kind: the authors' page tells. No pickle is read, and no code that
    comes with SOURCE is run.

    \b
    revela-hub import trumancai/Revela-3b revela-3b/ --dtype bfloat16
    revela-hub import castorini/repllama-v1-7b-lora-passage repllama/ --base my-llama-2-7b/ --max-length 512
    revela-hub import Shitao/RetroMAE_BEIR retromae/ --revision refs/pr/1
    """
    from hub_cards.importing import import_model

    record = {"pooling": pooling, "query_prompt": query_prompt, "document_prompt": document_prompt}
    options = {"base": base, "revision": revision, "dtype": dtype, "max_length": max_length, "overwrite": overwrite}
    import_model(source, out, normalize=normalize, **record, **options)
    typer.echo(f"Wrote {out}")


@publishing.command("evaluate-lm")
def evaluate_causal_lms(
    models: Annotated[
        list[str],
        typer.Argument(help="Causal LMs: folders, Hub ids, PEFT adapters of one, or checkpoints that training wrote."),
    ],
    baseline: Annotated[
        list[str] | None, typer.Option(help="A model to compare with, such as the LM that training began with.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Names of lm-evaluation-harness' tasks, with commas. Left out: those of the Revela paper."),
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(help="A folder with YAML files of further tasks. Such files may run code: trust who wrote them."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples a task, for a trial.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a forward pass.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file as well.")] = None,
) -> None:
    """Measure what causal LMs can do, before and after Revela: lm-evaluation-harness, side by side.

    By default on what appendix C.6 of the paper takes, without examples in the prompt: ARC (easy and challenge), COPA,
    OpenBookQA, PIQA, RTE, WiC and Winogrande. Their data comes from the Hub.

    \b
    revela-hub evaluate-lm run/ --baseline meta-llama/Llama-3.2-1B --out lm.json
    revela-hub evaluate-lm run/checkpoint-500/ run/checkpoint-1000/ --tasks piqa,winogrande --limit 200
    """
    from hub_cards.evaluate_lm import TASKS, evaluate_lm

    names = TASKS if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    options = {"include_path": include_path, "limit": limit, "batch_size": batch_size, "out": out}
    evaluate_lm(models, baselines=baseline or [], tasks=names, **options)


@publishing.command("tables")
def print_tables(
    table: Annotated[
        list[str] | None,
        typer.Option(help="Which: revela-1, -6, -7, retromae-1 to -5; may be given several times. All, if left out."),
    ] = None,
    results: Annotated[
        list[str] | None,
        typer.Option(help="A JSON file that `revela-hub evaluate --out` wrote; may be given several times."),
    ] = None,
    format: Annotated[str, typer.Option(help="markdown, or csv: a line a value.")] = "markdown",
) -> None:
    """Print the papers' tables: the published numbers, and your models' below.

    Tables 1, 6 and 7 of Revela (CoIR, BEIR, BRIGHT) and 1 to 5 of RetroMAE. Models are added from --results; what is
    missing, in the paper's text or in yours, is shown as missing. Tasks that are no column of the tables asked for are
    shown in one more table.

    \b
    revela-hub tables --table retromae-1 --results results.json
    revela-hub tables --format csv > tables.csv
    """
    from hub_cards.tables import as_csv, as_markdown, fill_table, load_tables, other_tasks, read_results

    published = load_tables()
    if unknown := [name for name in table or () if name not in published]:
        raise ValueError(f"There is no table {unknown[0]!r}; choose one of {', '.join(published)}.")
    if format not in ("markdown", "csv"):
        raise ValueError(f"--format {format} is unknown; choose markdown or csv.")
    measured = read_results(results or [])
    filled = {name: (published[name], fill_table(published[name], measured)) for name in table or published}
    if others := other_tasks([one for one, _ in filled.values()], measured):
        filled["other"] = (others, fill_table(others, measured))
    typer.echo(
        as_csv(filled) if format == "csv" else "\n".join(as_markdown(*one) for one in filled.values()), nl=False
    )
