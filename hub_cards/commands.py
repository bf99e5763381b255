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
