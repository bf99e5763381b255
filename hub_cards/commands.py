"""The commands of `revela-hub` that publish and compare; `revela_hub.py` holds the others and adds these."""

import typer

publishing = typer.Typer(rich_markup_mode=None)
