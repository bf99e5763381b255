"""Which names can be ids of the Hub."""

import pytest
from typer.testing import CliRunner

from hub_cards.hub import may_be_hub_id
from revela_hub import app


@pytest.mark.parametrize("name", ["gpt2", "org/name", "BAAI/bge-small-en-v1.5", "me/a.b_c-d"])
def test_names_of_the_hub(name):
    assert may_be_hub_id(name)


@pytest.mark.parametrize(
    "name", ["run/checkpoint-5/", "a/b/c", "./run", "../run", "~/run", "/run", "texts.jsonl", "a/b.TXT"]
)
def test_paths_of_this_machine(name):
    assert not may_be_hub_id(name)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["evaluate", "nosuch/folder/", "--task", "t"], "There is no file or folder nosuch/folder/, and it"),
        (
            ["evaluate", "nosuch", "--task", "{task}"],
            "no such folder, so it was taken for a Hub id. (HF_HUB_OFF",
        ),
        (["search", "./nosuch", "{task}", "query"], "There is no file or folder ./nosuch, and it cannot be"),
        (
            ["prepare", "nosuch.jsonl", "--out", "{task}/out"],
            "nosuch.jsonl does not exist, and is not the id",
        ),
        (["prepare", "nosuch", "--out", "{task}/out"], "nosuch is neither a file or folder here nor a dataset that"),
    ],
)
def test_mistyped_paths_are_told_as_such(argv, said, beir_folder):
    result = CliRunner().invoke(app, [argument.format(task=beir_folder) for argument in argv])
    assert result.exit_code == 2 and said in result.output, result.output
