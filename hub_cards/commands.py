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
