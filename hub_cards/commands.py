"""The commands of `revela-hub` that publish and compare; `revela_hub.py` holds the others and adds these."""

from pathlib import Path
from typing import Annotated

import typer

publishing = typer.Typer(rich_markup_mode=None)


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
