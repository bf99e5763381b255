"""
Fine-tune an encoder, or a published retriever, on queries with relevant documents (RetroMAE, §4.1).

    accelerate launch trainers/finetune.py finetune-msmarco-dpr --train_set data/msmarco --output_dir out

In order:
1. Say what it learns from: `--train_set` is a folder in BEIR's format (corpus.jsonl, queries.jsonl, qrels/train.tsv),
   one of MS MARCO's files (collection.tsv, queries.train.tsv, qrels.train.tsv), or a file or dataset with columns
   query, positive and perhaps negative. `--dev_set` (or qrels/dev.tsv there) gives nDCG@10 while training.
2. Choose how, `--method`:
   dpr      tells a query's positive from the other documents of the batch and given hard negatives; the start.
   ance     mines hard negatives with the model itself, over the whole corpus and anew every --refresh_every steps.
   distill  trains a cross-encoder on mined negatives, and the retriever to rank them as it does; the last step.
   The paper's chain is dpr, then ance from its result, then distill from that.
3. Watch `eval_dev_cosine_ndcg@10` rise. `--grad_cache_batch_size 16` lets large batches fit into memory.
4. The output folder is a sentence-transformers model: `revela-hub evaluate`, `revela-hub search` and
   `SentenceTransformer(folder)` read it as it is.
"""

import copy
import math
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from sentence_transformers import CrossEncoder
from transformers import set_seed

from hub_cards.card import TRAINING_RECORD, read_training_record, write_card
from hub_cards.checkpoints import require_writable
from hub_cards.encoding import prompts_used
from hub_cards.export import export
from hub_cards.privacy import check_private
from modeling_revela.configuration_revela import check_matryoshka_dims
from trainers.arguments import parse_recipe, run_script
from trainers.backbones import leave_casting_to_autocast
from trainers.checks import cap_workers, check_at_least, check_choice, check_steps
from trainers.distillation import load_cross_encoder, score_rows, train_cross_encoder
from trainers.finetune_data import (
    DevelopmentSet,
    TrainingSet,
    has_development_set,
    load_development_set,
    load_training_set,
)
from trainers.finetune_model import ModelArguments, load_model, merge_adapters, save_result
from trainers.finetune_trainer import (
    CROSS_ENCODER,
    NEGATIVES,
    FinetuneTrainer,
    FinetuneTrainingArguments,
    StopAt,
    curves,
    make_evaluator,
    make_loss,
    starting_point,
    step_of,
    write_record,
)
from trainers.hard_negatives import (
    MiningOptions,
    draw_negatives,
    is_written,
    load_tensors,
    mine,
    pad_negatives,
    save_tensors,
)
from trainers.pushing import PUSHING
from trainers.record import describe_machine, describe_run
from trainers.record import write_record as write_training_record

METHODS = ("dpr", "ance", "distill")


@dataclass
class DataArguments:
    """What is read."""

    train_set: str = field(
        metadata={"help": "BEIR or MS MARCO folder, file (.parquet, .jsonl, .csv, triples as .tsv) or datasets id."}
    )
    train_split: str = field(default="train", metadata={"help": "Which qrels of a folder, or split of a dataset."})
    train_config: str | None = field(default=None, metadata={"help": "Configuration of the datasets id."})
    negatives_file: str | None = field(
        default=None,
        metadata={"help": "Hard negatives by id: lines of a query's id and its negatives', or a TREC run."},
    )
    corpus: str | None = field(
        default=None,
        metadata={
            "help": "Further documents to mine negatives from, where the training set is rows of texts: BEIR folder, "
            "JSONL, MS MARCO's or DPR's TSV."
        },
    )
    dev_set: str | None = field(
        default=None, metadata={"help": "What nDCG@10 is measured on; the training folder's dev qrels, if it has any."}
    )
    dev_split: str = field(default="dev", metadata={"help": "Which qrels or split of the development set."})
    dev_queries: int | None = field(default=500, metadata={"help": "At most so many queries, drawn at random."})
    dev_documents: int | None = field(
        default=50_000,
        metadata={"help": "At most so many documents: the judged ones, and others. Fewer make higher numbers."},
    )

    def __post_init__(self):
        check_at_least(self, dev_queries=1, dev_documents=1)


@dataclass
class MethodArguments:
    """How it learns."""

    method: str = field(default="dpr", metadata={"help": "dpr, ance or distill; see above.", "choices": METHODS})
    num_negatives: int = field(
        default=7, metadata={"help": "Hard negatives a query, drawn anew each epoch. dpr has them if the data does."}
    )
    temperature: float | None = field(
        default=None, metadata={"help": "Divides the similarities; 0.05 for cosine and 1 for dot, if left out."}
    )
    matryoshka_dims: list[int] | None = field(
        default=None,
        metadata={
            "help": "Sizes, rising, that an embedding may be cut to, as in 64 128: the loss is taken at each of them "
            "and at the whole size, with cosine."
        },
    )
    matryoshka_weights: list[float] | None = field(
        default=None,
        metadata={"help": "What each of these sizes counts in the loss, the whole size last; 1 each, if left out."},
    )
    cross_device_negatives: bool = field(
        default=True, metadata={"help": "dpr, ance: documents of the other processes' queries are negatives too."}
    )
    grad_cache_batch_size: int = field(
        default=0,
        metadata={"help": "dpr, ance: texts in memory at once (GradCache), whatever the batch size; 0 holds all."},
    )
    refresh_every: int | None = field(
        default=None,
        metadata={"help": "Steps until negatives are mined anew; 0 mines once. ance: each epoch, if left out."},
    )
    mining_depth: int = field(default=200, metadata={"help": "Negatives are drawn from so many, the best ranked."})
    mining_skip: int = field(default=0, metadata={"help": "The best so many are left out, as likely relevant."})
    false_negative_margin: float = field(
        default=0.0,
        metadata={
            "help": "Documents that score less than this below the positive are left out as likely relevant; negative "
            "values allow scores above it, -inf (in a recipe: -.inf) keeps all."
        },
    )
    teacher: str | None = field(
        default=None, metadata={"help": "distill: a trained cross-encoder to use as it is, instead of training one."}
    )
    cross_encoder: str | None = field(
        default=None,
        metadata={"help": "distill: the encoder a teacher is trained from; the retriever's, if left out."},
    )
    cross_encoder_epochs: float = field(default=1.0, metadata={"help": "distill: epochs of the teacher."})
    cross_encoder_learning_rate: float = field(default=1e-5, metadata={"help": "distill: its peak learning rate."})
    cross_encoder_batch_size: int = field(default=4, metadata={"help": "distill: its queries a device."})
    cross_encoder_max_length: int = field(default=256, metadata={"help": "distill: its tokens a query and document."})
    teacher_temperature: float = field(default=1.0, metadata={"help": "distill: divides the teacher's scores."})

    def __post_init__(self):
        check_choice("method", self.method, METHODS)
        check_at_least(self, mining_skip=0, refresh_every=0, grad_cache_batch_size=0)
        check_at_least(self, cross_encoder_batch_size=1, cross_encoder_max_length=1)
        if self.num_negatives < 0 or (self.num_negatives == 0 and self.method != "dpr"):
            raise ValueError(f"`num_negatives` must be 1 or more for {self.method}, not {self.num_negatives}.")
        if self.mining_depth < self.num_negatives:
            raise ValueError(
                f"`mining_depth` {self.mining_depth} leaves too few to draw `num_negatives` {self.num_negatives} from."
            )
        check_matryoshka_dims(self.matryoshka_dims)
        weights, sizes = self.matryoshka_weights, len(self.matryoshka_dims or ()) + 1
        if weights is not None and (
            self.matryoshka_dims is None
            or len(weights) != sizes
            or not all(0 < weight < math.inf for weight in weights)
        ):
            raise ValueError(
                f"`matryoshka_weights` are {weights}: give one above 0 for each of `matryoshka_dims` "
                f"{self.matryoshka_dims}, and one more for the whole size."
            )
        for name in ("temperature", "teacher_temperature", "cross_encoder_epochs", "cross_encoder_learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be above 0, not {value}.")


class Finetuning:
    """
    A run: its data, its model, and what each step is trained on.

    The steps fall into rounds, which end with an epoch or where negatives are mined anew. The negatives of a round are
    drawn once, written to `output_dir/negatives` and read from there on resumption; the order of the queries and the
    learning rate go on over all rounds as in one run.
    """

    def __init__(
        self,
        model_args: ModelArguments,
        data: TrainingSet,
        method: MethodArguments,
        args: FinetuneTrainingArguments,
        development: DevelopmentSet | None = None,
        callbacks: list | None = None,
    ):
        if args.n_gpu > 1:
            raise ValueError(
                f"One process sees {args.n_gpu} GPUs: start one a GPU with `accelerate launch --multi_gpu`, or set "
                "CUDA_VISIBLE_DEVICES to one of them."
            )
        require_writable(args.output_dir, "--output_dir")
        if args.eval_strategy != "no" and development is None:
            raise ValueError("There is nothing to evaluate on: name a --dev_set, or leave eval_strategy at no.")
        set_seed(args.seed)
        self.facts, self._began, self._seconds_before = {}, time.time(), 0.0
        self.method, self.model_args, self.callbacks = method, model_args, callbacks or []
        self.data = data
        if method.method == "distill":
            # What is wrong with the teacher is better known now than after hours of mining.
            self._load_teacher("cpu")
        self.evaluator = make_evaluator(development, args.per_device_eval_batch_size)
        self.model = load_model(model_args, method.matryoshka_dims).to(args.device)
        if args.device.type == "cpu" and args.bf16:
            # The fused kernel's backward in bf16 on a CPU is several times slower than plain products.
            self.model.transformers_model.set_attn_implementation("eager")
        if args.bf16 or args.fp16:
            leave_casting_to_autocast(self.model)
        self.args = copy.copy(args)
        self.folder = Path(args.output_dir)
        if self.args.metric_for_best_model == "eval_dev_cosine_ndcg@10":
            self.args.metric_for_best_model = f"eval_dev_{self.model.similarity_fn_name}_ndcg@10"
        # A query is given no more random documents than the data has negatives of it.
        given = max(map(len, self.data.negatives)) if method.method == "dpr" else method.num_negatives
        self.num_negatives = min(method.num_negatives, given)
        batches = len(self.make_trainer(self.rows(None)).get_train_dataloader())
        if batches == 0:
            raise ValueError(
                f"{len(self.data.pairs)} pairs are too few for one batch: lower --per_device_train_batch_size."
            )
        self.epoch_steps = max(1, math.ceil(batches / args.gradient_accumulation_steps))
        if args.max_steps <= 0:
            self.args.max_steps = math.ceil(args.num_train_epochs * self.epoch_steps)
        self.refresh = self.epoch_steps if method.refresh_every is None else method.refresh_every
        if method.method == "dpr" or (method.method == "distill" and method.refresh_every is None):
            self.refresh = 0

    @property
    def record(self) -> dict:
        """The settings that decide what a step learns from."""
        args = self.args
        return {
            "method": asdict(self.method),
            "pairs": len(self.data.pairs),
            "documents": len(self.data.documents),
            "data": self.data.digest,
            "seed": args.seed,
            "queries_a_step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        }

    def describe(self, step: int) -> dict:
        """What `training_record.json` has at a step: `facts` (of options and data), the machine and the time."""
        seconds = self._seconds_before + time.time() - self._began
        machine = describe_machine(self.args.device, self.args.world_size)
        return {"step": step, **self.facts, **machine, "seconds": seconds}

    def boundaries(self) -> list[int]:
        """Steps at which a round begins: 0 among them, the last step not."""
        steps = {0}
        if self.num_negatives:
            steps |= set(range(0, self.args.max_steps, self.epoch_steps))
        if self.refresh:
            steps |= set(range(0, self.args.max_steps, self.refresh))
        return sorted(steps)

    def rows(self, negatives: torch.Tensor | None, scores: torch.Tensor | None = None) -> Dataset:
        """The examples as texts: query, positive, negative_1, … and for distillation the teacher's scores."""
        data = self.data
        columns = {
            "query": [data.queries[query] for query, _ in data.pairs],
            "positive": [data.documents[document] for _, document in data.pairs],
        }
        for number, column in enumerate([] if negatives is None else negatives.T.tolist(), start=1):
            columns[f"negative_{number}"] = [data.documents[document] for document in column]
        if scores is not None:
            columns["label"] = scores.tolist()
        return Dataset.from_dict(columns)

    def round_rows(self, start: int) -> Dataset:
        """What the round that begins at step `start` is trained on; the model has the weights of that step."""
        if not self.num_negatives:
            return self.rows(None)
        path = self.folder / NEGATIVES / f"rows-{start}.safetensors"
        if not is_written(path):
            negatives = draw_negatives(self._candidates(start), self.data, self.num_negatives, [self.args.seed, start])
            tensors = {"negatives": negatives}
            if self.method.method == "distill":
                tensors["scores"] = self._teach(negatives)
            save_tensors(tensors, path)
        tensors = load_tensors(path)
        scores = tensors.get("scores")
        return self.rows(tensors["negatives"], None if scores is None else scores / self.method.teacher_temperature)

    def _candidates(self, start: int) -> torch.Tensor:
        if self.method.method == "dpr":
            return pad_negatives(self.data.negatives)
        mined_at = start // self.refresh * self.refresh if self.refresh else 0
        path = self.folder / NEGATIVES / f"mined-{mined_at}.safetensors"
        if not is_written(path):
            if mined_at != start:
                raise FileNotFoundError(f"{path} is gone, and with it what the run was trained on: start it anew.")
            method = self.method
            options = MiningOptions(method.mining_depth, method.mining_skip, method.false_negative_margin)
            mined = mine(self.model, self.data, options, self.args.per_device_eval_batch_size)
            save_tensors({"negatives": mined}, path)
        return load_tensors(path)["negatives"]

    @property
    def _teacher(self) -> str:
        """Where the teacher comes from, or what it is trained from."""
        return self.method.teacher or self.method.cross_encoder or self.model_args.model_name_or_path

    def _load_teacher(self, device) -> CrossEncoder:
        length, trust = self.method.cross_encoder_max_length, self.model_args.trust_remote_code
        return load_cross_encoder(self._teacher, length, trust, device, is_trained=self.method.teacher is None)

    def _teach(self, negatives: torch.Tensor) -> torch.Tensor:
        method = self.method
        if method.teacher is not None:
            teacher = self._load_teacher(self.args.device)
        else:
            teacher = train_cross_encoder(
                self._teacher,
                self.folder / CROSS_ENCODER,
                self.data,
                negatives,
                self.args,
                epochs=method.cross_encoder_epochs,
                learning_rate=method.cross_encoder_learning_rate,
                batch_size=method.cross_encoder_batch_size,
                max_length=method.cross_encoder_max_length,
                trust_remote_code=self.model_args.trust_remote_code,
            )
        return score_rows(teacher, self.data, negatives, self.args.per_device_eval_batch_size)

    def make_loss(self) -> torch.nn.Module:
        method = self.method
        return make_loss(
            self.model,
            method.method,
            method.temperature,
            method.cross_device_negatives,
            method.grad_cache_batch_size,
            method.matryoshka_dims,
            method.matryoshka_weights,
        )

    def make_trainer(self, rows: Dataset, stop_at: int | None = None, is_first: bool = True) -> FinetuneTrainer:
        """The trainer of a round."""
        args = copy.copy(self.args)
        args.eval_on_start = args.eval_on_start and is_first
        if stop_at is not None:
            args.load_best_model_at_end = False  # the next round goes on from the last state
        prompts = prompts_used(self.model)
        args.prompts = {
            name: prompts["query" if name == "query" else "document"] for name in rows.column_names if name != "label"
        }
        trainer = FinetuneTrainer(
            model=self.model,
            args=args,
            train_dataset=rows,
            loss=self.make_loss(),
            evaluator=self.evaluator,
            callbacks=[*self.callbacks, *([] if stop_at is None else [StopAt(stop_at)])],
        )
        trainer.describe = self.describe
        return trainer

    def train(self, checkpoint: str | None = None) -> FinetuneTrainer:
        """Train all rounds, from the start or a checkpoint; returns the last round's trainer."""
        begins = self.boundaries()
        step = 0 if checkpoint is None else step_of(checkpoint)
        if checkpoint is not None:
            self._seconds_before = read_training_record(checkpoint).get("seconds", 0.0)
        if step >= self.args.max_steps:
            raise ValueError(f"{checkpoint} is at step {step}, and the run ends at {self.args.max_steps}.")
        current = max(index for index, begin in enumerate(begins) if begin <= step)
        for index in range(current, len(begins)):
            stop_at = begins[index + 1] if index + 1 < len(begins) else None
            if checkpoint is not None and index == current:
                # Mining comes before the trainer reads the checkpoint.
                self.make_trainer(self.rows(None))._load_from_checkpoint(checkpoint)
            trainer = self.make_trainer(self.round_rows(begins[index]), stop_at, is_first=index == 0)
            trainer.train(resume_from_checkpoint=checkpoint)
            trainer.stop.leave_if_told(self.args, trainer.state)
            if self.args.save_strategy == "no" and checkpoint is not None and PartialState().is_main_process:
                # Only a round's end asked for it; it has served.
                if Path(checkpoint).parent == self.folder and step_of(checkpoint) == begins[index]:
                    shutil.rmtree(checkpoint)
            if stop_at is not None:
                checkpoint = str(self.folder / f"checkpoint-{stop_at}")
        return trainer


def _development_set(arguments: DataArguments, args) -> DevelopmentSet | None:
    source = arguments.dev_set
    if source is None and has_development_set(arguments.train_set, arguments.dev_split):
        source = arguments.train_set
    if source is None:
        return None
    return load_development_set(
        source, arguments.dev_split, None, arguments.dev_queries, arguments.dev_documents, seed=args.seed
    )


def _take_over(checkpoint: str, folder: Path) -> None:
    """Bring along the negatives and teacher of the run that a checkpoint is from; drop those of later steps."""
    run, step = Path(checkpoint).parent, step_of(checkpoint)
    if run.resolve() != folder.resolve():
        for name in (NEGATIVES, CROSS_ENCODER):
            if (run / name).is_dir():
                shutil.copytree(run / name, folder / name, dirs_exist_ok=True)
    for file in (folder / NEGATIVES).glob("*-*.safetensors"):
        if int(file.stem.rpartition("-")[2]) > step:
            file.unlink()


def train(
    model_args: ModelArguments,
    data_args: DataArguments,
    method_args: MethodArguments,
    args: FinetuneTrainingArguments,
    callbacks: list | None = None,
) -> FinetuneTrainer:
    """Fine-tune, or go on with an earlier run; the retriever is left in the output folder, LoRA merged into it."""
    check_steps(args)
    cap_workers(args)
    data = load_training_set(
        data_args.train_set,
        data_args.train_split,
        data_args.train_config,
        negatives=data_args.negatives_file,
        corpus=data_args.corpus,
    )
    run = Finetuning(model_args, data, method_args, args, _development_set(data_args, args), callbacks)
    run.facts = {"method": method_args.method, **describe_run((model_args, data_args, method_args, args))}
    run.facts["data"][0] |= {"pairs": len(data.pairs), "corpus": len(data.documents)}
    return run_to_end(run)


def run_to_end(run: Finetuning) -> FinetuneTrainer:
    """Train a run, or go on with an earlier one; the retriever is left in its output folder, LoRA merged into it."""
    args = run.args
    state = PartialState()
    with args.main_process_first(local=False):
        checkpoint = starting_point(args, run.record)
    state.wait_for_everyone()
    write_record(args, run.record)
    if checkpoint is not None and state.is_main_process:
        _take_over(checkpoint, run.folder)
    state.wait_for_everyone()
    trainer = run.train(checkpoint)
    if run.evaluator is not None and not _is_measured(trainer):
        trainer.evaluate()
    trainer.save_state()
    if run.model_args.lora_r:
        merge_adapters(run.model)
    if state.is_main_process:
        record = run.describe(trainer.state.global_step) | {"log_history": curves(trainer.state.log_history)}
        if args.load_best_model_at_end and trainer.state.best_global_step:
            record["weights_of_step"] = trainer.state.best_global_step
        write_training_record(run.folder / TRAINING_RECORD, record)
        save_result(run.model, run.folder)
        with suppress(OSError):
            (run.folder / "eval").rmdir()  # made for evaluators that write files, which this one does not
    state.wait_for_everyone()
    if args.push_to_hub and state.is_main_process:
        # With a card of ours: sentence-transformers' own shows texts that were trained on.
        staged = run.folder / PUSHING
        shutil.rmtree(staged, ignore_errors=True)
        export(run.folder, staged, dtype=str(run.model.dtype).removeprefix("torch."), card=False)
        write_card(staged, repo_id=trainer.hub_model_id)
        check_private(staged)
        trainer.push_staged(staged)
    return trainer


def _is_measured(trainer: FinetuneTrainer) -> bool:
    """Whether the last step was evaluated, and the weights are still those of it."""
    last = [entry["step"] for entry in trainer.state.log_history if "eval_runtime" in entry][-1:]
    return last == [trainer.state.global_step] and not trainer.args.load_best_model_at_end


def main(argv: list[str] | None = None) -> None:
    classes = (ModelArguments, DataArguments, MethodArguments, FinetuneTrainingArguments)
    train(*parse_recipe(classes, argv, description=__doc__))


if __name__ == "__main__":
    run_script(main)
