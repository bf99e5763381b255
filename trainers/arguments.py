"""A recipe (YAML) plus command-line overrides -> dataclasses."""

import sys
from dataclasses import fields
from pathlib import Path

import yaml
from transformers import HfArgumentParser

RECIPES = Path(__file__).parent / "recipes"


def parse_recipe(
    dataclasses: tuple[type, ...], argv: list[str] | None = None, description: str | None = None
) -> tuple:
    """
    Parse `[RECIPE.yaml | recipe name] [--field value ...]`; the command line wins over the recipe.

    Args:
        dataclasses: the config classes, whose fields are the options.
        argv: the arguments; `sys.argv[1:]` where it is `None`.

    Returns:
        One instance a class.

    Raises:
        SystemExit: for an unknown option, as argparse does.
        ValueError, FileNotFoundError: for a recipe that is missing, no mapping, or has a field that does not exist.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(
        dataclasses,
        description=description,
        usage="%(prog)s [RECIPE] [--field value ...]\n\nRECIPE is a YAML file, or the name of a shipped recipe.",
    )
    recipe = {}
    if argv and not argv[0].startswith("-"):
        recipe = read_recipe(argv.pop(0))
        known = {item.name for cls in dataclasses for item in fields(cls) if item.init}
        unknown = sorted(set(recipe) - known)
        if unknown:
            raise ValueError(f"The recipe has no field {', '.join(map(repr, unknown))}: see --help for what there is.")
        # argparse converts string defaults by the type of the field, so that a YAML 1e-4, which is a string, works.
        parser.set_defaults(**recipe)
        for action in parser._actions:
            if action.dest in recipe:
                action.required = False
    return parser.parse_args_into_dataclasses(args=argv)


def read_recipe(name: str) -> dict:
    """The mapping in a YAML file, or in the shipped recipe of that name."""
    path = Path(name)
    if not path.exists():
        path = RECIPES / f"{name.removesuffix('.yaml')}.yaml"
    if not path.exists():
        names = ", ".join(sorted(item.stem for item in RECIPES.glob("*.yaml")))
        raise FileNotFoundError(f"No recipe {name!r}: it is neither a file nor one of {names}.")
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} is no recipe: it must be a mapping of field to value.")
    return recipe


__all__ = ["RECIPES", "parse_recipe", "read_recipe"]
