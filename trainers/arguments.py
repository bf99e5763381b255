"""A recipe (YAML) plus command-line overrides -> dataclasses."""

import os
import re
import sys
import traceback
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser

from hub_cards.hub import one_line

RECIPES = Path(__file__).parent / "recipes"


def parse_recipe(
    dataclasses: tuple[type, ...], argv: list[str] | None = None, description: str | None = None
) -> tuple:
    """
    Parse `[RECIPE.yaml | recipe name] [--field value ...]`; the command line wins over the recipe.

    `--field null` gives a field that may be `None` that value, whatever the recipe says.

    Args:
        dataclasses: the config classes, whose fields are the options.
        argv: the arguments; `sys.argv[1:]` where it is `None`.

    Returns:
        One instance a class.

    Raises:
        SystemExit: for an unknown option or a value of the wrong type, as argparse does.
        ValueError, FileNotFoundError: for a recipe that is missing, no mapping, or has a field that does not exist.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(
        dataclasses,
        description=description,
        formatter_class=_Formatter,
        usage="%(prog)s [RECIPE] [--field value ...]\n\nRECIPE is a YAML file, or the name of a shipped recipe.",
        allow_abbrev=False,
    )
    for action in parser._actions:
        if action.option_strings[0].startswith("--no_"):
            action.help = SUPPRESS  # the same help again; `--field false` says it as well
    recipe = read_recipe(argv.pop(0)) if argv and not argv[0].startswith("-") else {}
    hints = {name: hint for kind in dataclasses for name, hint in get_type_hints(kind).items()}
    nulls, argv = _take_nulls(hints, argv)
    argv = _as_options(parser, hints, recipe | dict.fromkeys(nulls)) + argv
    *parsed, rest = parser.parse_args_into_dataclasses(
        args=argv, look_for_args_file=False, return_remaining_strings=True
    )
    if rest:
        near = _near(rest[0], [action.dest for action in parser._actions])
        parser.error(f"no option {rest[0]}" + (f"; did you mean {near}?" if near else ": see --help."))
    return tuple(parsed)


def _near(option: str, names: list[str]) -> str | None:
    """The option that a wrong one may stand for: a short form (`--lr`), a part (`--batch_size`) or a misspelling."""
    wrong = option.partition("=")[0].lstrip("-").replace("-", "_").lower()
    short = [name for name in names if "".join(word[0] for word in name.split("_")) == wrong]
    longer = [name for name in names if len(wrong) > 3 and wrong in name]
    found = short or longer or get_close_matches(wrong, names, n=1, cutoff=0.7)
    return " or ".join(f"--{name}" for name in found[:3]) or None


def _take_nulls(hints: dict, argv: list[str]) -> tuple[list[str], list[str]]:
    """The fields that a command line sets to null, and what else it says; only of fields that may be `None`."""
    nulls, rest = [], []
    for argument in (word for option in argv for word in _split_null(option)):
        name = rest[-1].removeprefix("--").replace("-", "_") if rest and rest[-1].startswith("--") else ""
        if argument == "null" and type(None) in get_args(hints.get(name)):
            nulls.append(name)
            rest.pop()
        else:
            rest.append(argument)
    return nulls, rest


def _split_null(argument: str) -> list[str]:
    return argument.split("=") if re.fullmatch(r"--[\w-]+=null", argument) else [argument]


def run_script(main: Callable[[], None]) -> None:
    """
    Run a script's `main`; an error that our code raises, or the file system, ends it with one line and status 2.

    What other packages raise keeps its traceback, and so does all with REVELA_DEBUG=1.
    """
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        raised_by = frame.f_globals.get("__name__", "").partition(".")[0]
        ours = raised_by in ("__main__", "trainers", "hub_cards", "modeling_revela", "modeling_retromae")
        if os.environ.get("REVELA_DEBUG") or not (ours or isinstance(error, OSError)):
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


class _Formatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Defaults behind the help texts, the description as it was written, and one spelling of each option."""

    def _format_action_invocation(self, action):
        return " ".join(filter(None, [action.option_strings[0], self._format_args(action, "VALUE")]))


def _as_options(parser: HfArgumentParser, hints: dict, recipe: dict) -> list[str]:
    """
    The recipe's fields as options before the command line's, so that argparse converts and checks both alike: a YAML
    1e-4, for one, is a string. What has no form on the command line (null, mappings, some lists) becomes a default.
    """
    actions = {action.dest: action for action in reversed(parser._actions) if action.dest != "help"}
    unknown = sorted(set(recipe) - set(actions), key=str)
    if unknown:
        raise ValueError(f"The recipe has no field {', '.join(map(repr, unknown))}: see --help for what there is.")
    options = []
    for name, value in recipe.items():
        action = actions[name]
        takes_list = action.nargs == "+"
        if value is False and "no" in (action.choices or ()):
            value = "no"  # YAML's word for false: `save_strategy: no`
        if takes_list and isinstance(value, list) and value:
            options += [f"--{name}", *map(str, value)]
        elif takes_list and value is not None and not isinstance(value, list):
            options += [f"--{name}", str(value)]
        elif value is None or isinstance(value, (list, dict)):
            kinds = {get_origin(kind) or kind for kind in (hints[name], *get_args(hints[name]))}
            if type(value) not in kinds:
                raise ValueError(f"The recipe's `{name}` cannot be {'null' if value is None else value}: see --help.")
            parser.set_defaults(**{name: value})
            action.required = False
        else:
            options.append(f"--{name}={value}")
    return options


def read_recipe(name: str) -> dict:
    """The mapping in a YAML file, or in the shipped recipe of that name."""
    path = Path(name)
    if not path.is_file():
        path = RECIPES / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(item.stem for item in RECIPES.glob("*.yaml")))
        raise FileNotFoundError(f"No recipe {name!r}: it is neither a file nor one of {names}.")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        raise
    except Exception as error:  # PyYAML lets ValueError, KeyError (`!!bool x`), RecursionError and more through
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} is no recipe: it must be a mapping of field to value.")
    return recipe


__all__ = ["RECIPES", "parse_recipe", "read_recipe", "run_script"]
