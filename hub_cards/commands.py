"""The commands of `revela-hub` that publish and compare; `revela_hub.py` holds the others and adds these."""

from pathlib import Path
from typing import Annotated

import typer

publishing = typer.Typer(rich_markup_mode=None)


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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier onnx/.")] = False,
) -> None:
    """Write the model as ONNX into its folder, for sentence-transformers' backend="onnx", onnxruntime and TEI on CPUs.

    Needs pip install "revela-hub[onnx]". ONNX is compared with torch before it is written.

    \b
    revela-hub export-onnx retriever/
    """
    from hub_cards.onnx_export import export_onnx

    typer.echo(f"Wrote {export_onnx(folder, overwrite)}")


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
    missing, in the paper's text or in yours, is shown as missing.

    \b
    revela-hub tables --table retromae-1 --results results.json
    revela-hub tables --format csv > tables.csv
    """
    from hub_cards.tables import as_csv, as_markdown, fill_table, load_tables, read_results

    published = load_tables()
    if unknown := [name for name in table or () if name not in published]:
        raise ValueError(f"There is no table {unknown[0]!r}; choose one of {', '.join(published)}.")
    if format not in ("markdown", "csv"):
        raise ValueError(f"--format {format} is unknown; choose markdown or csv.")
    measured = read_results(results or [])
    filled = {name: (published[name], fill_table(published[name], measured)) for name in table or published}
    typer.echo(
        as_csv(filled) if format == "csv" else "\n".join(as_markdown(*one) for one in filled.values()), nl=False
    )
