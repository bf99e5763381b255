import csv
import io
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hub_cards.tables import as_csv, as_markdown, fill_table, load_tables, read_results
from revela_hub import app

NAMES = ["revela-1", "revela-6", "revela-7", *(f"retromae-{number}" for number in range(1, 6))]


def cells(markdown: str) -> dict[str, list[str]]:
    """Name -> cells of a table in Markdown, the header under `model`."""
    rows = [re.split(r" (?<!\\)\| ", line[2:-2]) for line in markdown.splitlines() if line.startswith("| ")]
    return {name: values for name, *values in rows}


def results(model, **scores):
    return {"rows": [{"model": model, "task": task, "scores": found} for task, found in scores.items()]}


def test_all_tables_are_there_and_rectangular():
    tables = load_tables()
    assert list(tables) == NAMES
    for table in tables.values():
        assert table["source"]["arxiv"] in ("2506.16552", "2205.12035")
        for column in table["columns"]:
            assert column.get("mean") or column["measure"]
        for values in table["rows"].values():
            assert len(values) in (0, len(table["columns"]))
            assert all(value is None or 0 < value < 1 for value in values)


def test_published_averages_are_the_means_of_their_rows():
    """The paper's own sums check the transcription."""
    rows = load_tables()["retromae-1"]["rows"]
    assert len(rows) == 9
    for model, (*values, average) in rows.items():
        assert sum(values) / 18 == pytest.approx(average, abs=6e-4), model


def test_published_numbers_rise_with_depth_as_they_must():
    for name in ("retromae-2", "retromae-3", "retromae-4", "retromae-5"):
        table = load_tables()[name]
        labels = [column["label"] for column in table["columns"]]
        for model, values in table["rows"].items():
            for before, after in zip(range(len(labels)), range(1, len(labels)), strict=False):
                same_measure = labels[before].rpartition("@")[0] == labels[after].rpartition("@")[0]
                if same_measure and None not in (values[before], values[after]):
                    assert values[before] < values[after], (name, model, labels[after])


@pytest.mark.parametrize(
    "table, model, label, value",
    [
        # What the papers' prose says of their tables: +1.96 % over the strongest baseline with DPR, and so on.
        ("retromae-2", "RetroMAE", "MS MARCO MRR@10", 0.3357 + 0.0196),
        ("retromae-3", "RetroMAE", "NQ R@10", 0.7903 + 0.0141),
        ("retromae-4", "RetroMAE", "MS MARCO MRR@10", 0.382 + 0.011),
        ("retromae-5", "RetroMAE", "MS MARCO MRR@10", 0.395 + 0.021),
        ("retromae-1", "RetroMAE", "AVERAGE", 0.407 + 0.045),
        ("retromae-1", "LaPraDoR", "Touche-2020", 0.137),
        ("retromae-2", "SEED", "MS MARCO R@1000", 0.9539),
        ("retromae-3", "DiffCSE", "NQ R@30", 0.8410),
    ],
)
def test_published_numbers(table, model, label, value):
    table = load_tables()[table]
    index = [column["label"] for column in table["columns"]].index(label)
    assert table["rows"][model][index] == pytest.approx(value)


def test_ours_stand_below_in_the_papers_unit_and_what_is_missing_is_shown_as_missing():
    table = load_tables()["revela-6"]
    tasks = [column["task"] for column in table["columns"] if "task" in column]
    full = results("mine", **{task: {"ndcg_at_10": 0.5} for task in tasks[:-1]}, TRECCOVID={"ndcg_at_10": 0.25})
    part = results("half|done", NQ={"ndcg_at_10": 0.123}, mean={"ndcg_at_10": 0.9})
    other = results("no row", MSMARCO={"ndcg_at_10": 0.3})
    found = cells(as_markdown(table, fill_table(table, [full, part, other])))
    assert found["Revela 3B"] == ["–"] * 14
    assert found["**mine**"] == ["50.0"] * 12 + ["25.0", f"{(12 * 50 + 25) / 13:.1f}"]
    by_label = dict(zip(found["model"], found["**half\\|done**"], strict=True))
    assert by_label.pop("NQ") == "12.3" and set(by_label.values()) == {"–"}
    assert "**no row**" not in found


def test_a_local_folder_fills_the_column_of_its_name_and_several_files_make_one_row():
    table = load_tables()["retromae-1"]
    files = [results("m", **{"bio-asq": {"ndcg_at_10": 0.4}}), results("m", SciFact={"ndcg_at_10": 0.6})]
    (row,) = [row for row in fill_table(table, files) if not row["published"]]
    labels = [column["label"] for column in table["columns"]]
    assert row["values"][labels.index("BioASQ")] == 0.4 and row["values"][labels.index("SciFact")] == 0.6
    assert row["values"][-1] is None


def test_what_cannot_be_compared_is_marked():
    table = load_tables()["retromae-3"]
    mine = results("mine", NQ={"recall_at_20": 0.7}, MSMARCO={"mrr_at_10": 0.3})
    rows = fill_table(table, [mine])
    text = as_markdown(table, rows)
    assert "| 0.3000 |" in text and "| 0.7000† |" in text and "† not comparable: mteb's NQ is BEIR's" in text
    assert all("†" not in cell for cell in cells(text)["RetroMAE"])
    lines = list(csv.DictReader(io.StringIO(as_csv({"retromae-3": (table, rows)}))))
    assert len(lines) == 10 * 10
    ours = {line["column"]: line for line in lines if line["model"] == "mine"}
    assert ours["NQ R@20"]["comparable"] == "false" and ours["MS MARCO MRR@10"]["comparable"] == "true"
    assert ours["NQ R@10"]["value"] == "" and ours["NQ R@20"]["source"] == "measured"
    published = next(line for line in lines if line["model"] == "RetroMAE")
    assert published["value"] == "0.3822" and published["source"] == "arXiv 2205.12035, Table 3"


def run(*arguments):
    return CliRunner().invoke(app, ["tables", *map(str, arguments)])


def test_the_command_prints_all_or_some(tmp_path: Path):
    whole = run()
    assert whole.exit_code == 0 and whole.output.count("Source: arXiv") == 8
    file = tmp_path / "r.json"
    file.write_text(json.dumps(results("mine", MSMARCO={"mrr_at_10": 0.3})))
    some = run("--table", "retromae-4", "--table", "retromae-5", "--results", file)
    assert some.output.count("Source: arXiv") == 2 and some.output.count("| **mine** | 0.300 | – | – | – |") == 2
    assert "| coCondenser | 0.382 | – | – | 0.984 |" in some.output
    lines = run("--table", "retromae-4", "--results", file, "--format", "csv").output.splitlines()
    assert lines[0] == "table,model,source,column,value,comparable" and len(lines) == 1 + 3 * 4
    assert lines[2] == 'retromae-4,coCondenser,"arXiv 2205.12035, Table 4",MS MARCO R@10,,true'


def test_what_is_no_column_of_the_tables_asked_for_stands_in_one_more(tmp_path: Path):
    files = []
    for name, scores in (("Robust04", 0.25), ("my-task", 0.412), ("NQ", 0.5)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(results("mine", **{name: {"ndcg_at_10": scores}})))
    options = [word for file in files for word in ("--results", file)]
    found = run("--table", "retromae-1", *options).output
    papers, others = found.split("**Tasks that are no column of the tables asked for (nDCG@10, %)**")
    assert "| 0.250 |" in papers and "| 0.500 |" in papers
    assert cells(others) == {"model": ["my-task"], "---": ["---"], "**mine**": ["41.2"]}
    # Table 2 has MRR and recall of NQ, which were not measured.
    assert cells(run("--table", "retromae-2", *options).output.split("asked for")[1])["model"] == [
        "Robust04", "my-task", "NQ",
    ]  # fmt: skip
    lines = run("--table", "retromae-1", *options, "--format", "csv").output.splitlines()
    assert lines[-1] == "other,mine,measured,my-task,41.2,true"
    assert "no column" not in run("--table", "retromae-1", "--results", files[0]).output


def test_bad_input_is_one_line(tmp_path: Path):
    for content in (
        "nothing",
        "[]",
        '{"rows": [{"model": "m"}]}',
        '{"rows": [{"model": "m", "task": "t", "scores": 1}]}',
    ):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ValueError, match="bad.json holds no results; give what"):
            read_results([tmp_path / "bad.json"])
    for arguments, message in (
        (["--table", "revela-2"], "no table 'revela-2'; choose one of revela-1, "),
        (["--format", "html"], "--format html is unknown; choose markdown or csv"),
        (["--results", tmp_path / "gone.json"], "There is no file "),
    ):
        found = run(*arguments)
        assert found.exit_code == 2 and message in found.output and found.output.count("\n") == 1
