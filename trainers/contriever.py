"""
Train a retriever as Contriever is (Revela, §5 and C.1), the contrastive rival: pseudo queries cut from raw text.

    accelerate launch trainers/contriever.py contriever-llama-3.2-1b-wikipedia --train_sets prepared/ --output_dir out

In order:
1. Prepare text first, as for Revela: `revela-hub prepare SOURCE --out prepared/`. The same folder serves both, so that
   a comparison has the same text.
2. Choose a recipe (a YAML file or a shipped name) and override any field on the command line. Half of the queries are
   sentences taken out of a chunk (inverse cloze), half are other chunks of the document (independent cropping). They
   are cut once, with the seed, so that a second epoch repeats them.
3. Every other passage of the batch is a negative: `--per_device_train_batch_size 16` gives the paper's 15 a query.
   `--eval_strategy steps` measures nDCG@10 on pairs cut from the held-out documents.
4. The output folder is a sentence-transformers model: `revela-hub evaluate`, `revela-hub search` and
   `SentenceTransformer(folder)` read it as it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from datasets import Dataset

from trainers.arguments import parse_recipe, run_script
from trainers.checks import cap_workers, check_at_least, check_steps, check_weights
from trainers.data.prepared import load_groups, mix_sets
from trainers.data.pseudo_pairs import pseudo_pairs
from trainers.data.readers import DataError
from trainers.finetune import Finetuning, MethodArguments, run_to_end
from trainers.finetune_data import DevelopmentSet, TrainingSet, TrainingSetBuilder
from trainers.finetune_model import ModelArguments
from trainers.finetune_trainer import FinetuneTrainer, FinetuneTrainingArguments
from trainers.record import describe_run


@dataclass
class RawTextArguments:
    """Which prepared text is read, and how pairs are cut from it."""

    train_sets: list[str] = field(
        default_factory=list,
        metadata={"help": "Folders that `revela-hub prepare` wrote, or files of Revela's authors."},
    )
    train_weights: list[float] | None = field(
        default=None, metadata={"help": "How often groups of each set are drawn; by their sizes, if left out."}
    )
    validation_set: str | None = field(
        default=None, metadata={"help": "Prepared folder whose held-out groups are evaluated; the first train set's."}
    )
    validation_groups: int = field(default=512, metadata={"help": "At most so many held-out groups an evaluation."})
    inverse_cloze: float = field(
        default=0.5, metadata={"help": "Share of pairs made by inverse cloze; the rest by independent cropping."}
    )
    cloze_unit: list[str] = field(
        default_factory=lambda: ["sentence"],
        metadata={"help": "What inverse cloze takes out: sentence (prose) or line (code); for all sets, or one each."},
    )
    language: str = field(default="en", metadata={"help": "ISO 639 code for the sentences' ends."})

    def __post_init__(self):
        check_at_least(self, validation_groups=1)
        check_weights(self.train_sets, self.train_weights)
        if len(self.cloze_unit) not in (1, len(self.train_sets)):
            raise ValueError(
                f"`cloze_unit` has {len(self.cloze_unit)} values for {len(self.train_sets)} `train_sets`: give one or "
                "one each."
            )
        for unit in self.cloze_unit:
            next(pseudo_pairs([], 0, self.inverse_cloze, unit), None)  # raises for a share or unit that there is not

    def load_groups(self, name: str, split: str) -> Dataset:
        """A prepared set, with what inverse cloze takes out of its chunks."""
        groups = load_groups(name, split)
        units = dict(zip(self.train_sets, self.cloze_unit, strict=False))
        return groups.add_column("cloze_unit", [units.get(name, self.cloze_unit[0])] * len(groups))

    def pseudo_pairs(self, groups: Iterable, seed: int) -> Iterable[tuple[str, str]]:
        """The pairs of the contrastive method, which the others are measured on."""
        return pseudo_pairs(groups, seed, self.inverse_cloze, language=self.language)

    def training_pairs(self, groups: Iterable, seed: int) -> Iterable[tuple[str, str]]:
        """What is trained on."""
        return self.pseudo_pairs(groups, seed)


@dataclass
class PairArguments(RawTextArguments):
    """What is read, how pairs are cut from it, and how they are told apart."""

    temperature: float = field(default=0.01, metadata={"help": "Divides the similarities."})
    cross_device_negatives: bool = field(
        default=False, metadata={"help": "Passages of the other processes' queries are negatives too."}
    )
    grad_cache_batch_size: int = field(
        default=0, metadata={"help": "Texts in memory at once (GradCache), whatever the batch size; 0 holds all."}
    )

    def __post_init__(self):
        super().__post_init__()
        self.method()

    def method(self) -> MethodArguments:
        """In-batch negatives alone, as for DPR without hard ones."""
        return MethodArguments(
            method="dpr",
            num_negatives=0,
            temperature=self.temperature,
            cross_device_negatives=self.cross_device_negatives,
            grad_cache_batch_size=self.grad_cache_batch_size,
        )


def load_train_set(arguments: RawTextArguments, seed: int) -> TrainingSet:
    """The pairs cut from all prepared sets, mixed by weight."""
    names, weights = arguments.train_sets, arguments.train_weights
    if not names:
        raise ValueError("`train_sets` is empty: name at least one folder that `revela-hub prepare` wrote.")
    sets = [arguments.load_groups(name, "train") for name in names]
    groups = sets[0]
    if len(sets) > 1:
        groups = mix_sets(sets, [len(rows) for rows in sets] if weights is None else weights, seed)
    return _training_set(arguments, arguments.training_pairs(groups, seed), ", ".join(names))


def describe_raw_text(method: str, arguments: RawTextArguments, options: tuple, data: TrainingSet) -> dict:
    """What a training record says of a run on prepared sets: its options, the sets, and the examples made of them."""
    facts = describe_run(options, load_groups(arguments.train_sets[0], "train"))
    del facts["train_rows"]  # groups of the first set
    return {"method": method, **facts, "examples": len(data.pairs)}


def load_validation_set(arguments: RawTextArguments, seed: int) -> DevelopmentSet:
    """The pairs cut from held-out documents; a query's one relevant passage is the one it was cut from."""
    name = arguments.validation_set or arguments.train_sets[0]
    groups = arguments.load_groups(name, "validation")
    groups = groups.select(range(min(len(groups), arguments.validation_groups)))
    rows = _training_set(arguments, arguments.pseudo_pairs(groups, seed), name)
    return DevelopmentSet(
        queries={str(row): text for row, text in enumerate(rows.queries)},
        corpus={str(position): text for position, text in enumerate(rows.documents)},
        relevant={str(row): set(map(str, documents)) for row, documents in enumerate(rows.positives)},
    )


def _training_set(arguments: RawTextArguments, pairs: Iterable[tuple[str, str]], where: str) -> TrainingSet:
    builder = TrainingSetBuilder()
    for query, passage in pairs:
        builder.add(query, [builder.document(passage)])
    if not builder.set.queries:
        raise DataError(
            f"No pair can be cut from {where}: every document has one chunk in its group, of less than two "
            f"{' or '.join(arguments.cloze_unit)}s. Prepare it with more chunks of a document a group, or pass "
            "--inverse_cloze."
        )
    return builder.finish(where)


def train(
    model_args: ModelArguments,
    pair_args: PairArguments,
    args: FinetuneTrainingArguments,
    callbacks: list | None = None,
) -> FinetuneTrainer:
    """Train, or go on with an earlier run; the retriever is left in the output folder, LoRA merged into it."""
    check_steps(args)
    cap_workers(args)
    data = load_train_set(pair_args, args.seed)
    development = load_validation_set(pair_args, args.seed) if args.eval_strategy != "no" else None
    run = Finetuning(model_args, data, pair_args.method(), args, development, callbacks)
    run.facts = describe_raw_text("contriever", pair_args, (model_args, pair_args, args), data)
    return run_to_end(run)


def main(argv: list[str] | None = None) -> None:
    classes = (ModelArguments, PairArguments, FinetuneTrainingArguments)
    train(*parse_recipe(classes, argv, description=__doc__))


if __name__ == "__main__":
    run_script(main)
