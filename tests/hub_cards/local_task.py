"""A task of mteb's own class whose data comes from a BEIR folder instead of the Hub."""

import json

from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata


def make_task(folder, name="FruitRetrieval", fails=False, revision="1"):
    """A task of the data in `folder`; one that `fails` has no data to load."""

    class LocalTask(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name=name,
            description="fruit",
            type="Retrieval",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
            dataset={"path": "local/fruit", "revision": revision},
        )

        def load_data(self, num_proc=None, **kwargs):
            if fails:
                raise OSError("no network\nat all")
            records = {
                name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
                for name in ("corpus", "queries")
            }
            qrels = {}
            for line in (folder / "qrels" / "test.tsv").read_text().splitlines()[1:]:
                query, doc, grade = line.split("\t")
                qrels.setdefault(query, {})[doc] = int(grade)
            split = {
                "corpus": Dataset.from_list(
                    [{"id": r["_id"], "title": r["title"], "text": r["text"]} for r in records["corpus"]]
                ),
                "queries": Dataset.from_list(
                    [{"id": r["_id"], "text": r["text"]} for r in records["queries"] if r["_id"] in qrels]
                ),
                "relevant_docs": qrels,
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return LocalTask()
