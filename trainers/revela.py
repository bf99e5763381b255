"""
Train a retriever with Revela (arXiv 2506.16552): the LM's loss teaches the retriever which chunks help which.

    accelerate launch trainers/revela.py revela-smollm2-135m-wikipedia --train_sets prepared/ --output_dir out

In order:
1. Prepare text first: `revela-hub prepare SOURCE --out prepared/`.
2. Choose a recipe (a YAML file or a shipped name) and override any field on the command line.
3. Watch `in_batch_gain` rise above 0 and `mean_cosine` stay below 1; `eval_sibling_ndcg_at_10` picks the checkpoint.
4. Publish with `revela-hub export out/checkpoint-N retriever/`.
"""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, set_seed

from hub_cards.eos_tokenizer import append_eos
from modeling_revela import RevelaConfig, RevelaForPreTraining
from trainers.arguments import parse_recipe, run_script
from trainers.backbones import check_positions, fit_vocabulary, say_once
from trainers.checkpoints import last_checkpoint
from trainers.checks import cap_workers, check_at_least, check_dtype, check_lora, check_steps, check_weights
from trainers.data.collator import GroupCollator
from trainers.data.prepared import load_groups, mix_sets
from trainers.record import describe_run
from trainers.revela_trainer import RevelaTrainer, RevelaTrainingArguments


@dataclass
class ModelArguments:
    """Which two models, and how they are joined; the fields of `RevelaConfig`."""

    retriever_name_or_path: str = field(metadata={"help": "Backbone of the retriever: Hub id or folder."})
    lm_name_or_path: str | None = field(
        default=None, metadata={"help": "The causal LM trained along: Hub id or folder. The retriever's, if left out."}
    )
    pooling: str = field(
        default="eos",
        metadata={"help": "The retriever's embedding: eos (last token; for decoders), cls or mean (for encoders)."},
    )
    retriever_lora_r: int = field(default=0, metadata={"help": "LoRA rank for the retriever; 0 trains all weights."})
    retriever_lora_alpha: int | None = field(default=None, metadata={"help": "LoRA alpha; the rank, if left out."})
    retriever_lora_dropout: float = field(default=0.0, metadata={"help": "Dropout on the retriever's adapters."})
    lm_lora_r: int = field(default=0, metadata={"help": "LoRA rank for the LM; 0 trains all weights."})
    lm_lora_alpha: int | None = field(default=None, metadata={"help": "LoRA alpha; the rank, if left out."})
    lm_lora_dropout: float = field(default=0.0, metadata={"help": "Dropout on the LM's adapters."})
    freeze_lm: bool = field(default=False, metadata={"help": "Leave the LM as it is; train the retriever only."})
    v_norm: bool = field(default=True, metadata={"help": "V-normalisation (Eq. 8): on for prose, off for code."})
    in_batch_gate: bool = field(
        default=False,
        metadata={
            "help": "A learned gate per layer and head on in-batch attention; not in the paper, short runs need it."
        },
    )
    in_batch_gate_init: float = field(default=0.05, metadata={"help": "Where the gates start."})
    include_diagonal: bool = field(default=False, metadata={"help": "Let a chunk attend to itself too (ablation)."})
    dual_loss: bool = field(default=False, metadata={"help": "Add the plain next-token loss to the loss."})
    similarity_temperature: float = field(
        default=1e-4, metadata={"help": "Temperature of the softmax over similarities."}
    )
    trainable_temperature: bool = field(default=False, metadata={"help": "Learn the temperature."})
    similarity_dtype: str = field(
        default="float32",
        metadata={"help": "Precision of the similarities. bfloat16 is the authors' regime: ties at 1e-4."},
    )
    similarity_span: str = field(
        default="first_half",
        metadata={"help": "What the query side sees: first_half (prose) or full (code)."},
    )
    similarity_span_ratio: float = field(default=0.5, metadata={"help": "The share of tokens first_half keeps."})
    weight_floor: float = field(default=1e-7, metadata={"help": "In-batch weights at or below it are skipped."})
    query_prompt: str = field(default="query: ", metadata={"help": "Put before a chunk as query."})
    document_prompt: str = field(default="passage: ", metadata={"help": "Put before a chunk as passage."})
    matryoshka_dims: list[int] | None = field(
        default=None,
        metadata={
            "help": "Sizes, rising, that an embedding may be cut to, as in 64 128; the whole size always counts."
        },
    )
    embed_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Chunks the retriever embeds at a time: less memory in large groups, one more forward pass of it, "
            "the same gradients. All at once, if left out."
        },
    )
    save_backbones: bool = field(
        default=True,
        metadata={"help": "Put frozen backbone weights into checkpoints; False reads them again from their source."},
    )
    dtype: str = field(
        default="float32",
        metadata={"help": "Precision of the weights in memory; keep float32 and use --bf16 for fast products."},
    )

    def __post_init__(self):
        for half in ("retriever", "lm"):
            check_lora(self, f"{half}_")
        check_dtype(self.dtype)
        if self.freeze_lm and self.lm_lora_r:
            raise ValueError(
                f"`freeze_lm` leaves the LM as it is, so adapters of `lm_lora_r` {self.lm_lora_r} would not be "
                "trained: pass --lm_lora_r 0."
            )
        RevelaConfig(**self.config_fields())

    def config_fields(self) -> dict:
        """The fields of `RevelaConfig`."""
        same = (
            "freeze_lm", "v_norm", "in_batch_gate", "in_batch_gate_init", "include_diagonal", "dual_loss",
            "trainable_temperature", "similarity_dtype", "similarity_span", "similarity_span_ratio", "weight_floor",
            "query_prompt", "document_prompt", "embed_batch_size", "save_backbones", "pooling",
            "similarity_temperature", "matryoshka_dims",
        )  # fmt: skip
        return {name: getattr(self, name) for name in same} | {
            "retriever_lora": lora_fields(self, "retriever"),
            "lm_lora": lora_fields(self, "lm"),
        }


def lora_fields(arguments, half: str) -> dict | None:
    """`peft.LoraConfig` arguments for `retriever` or `lm`, `None` where all weights are trained."""
    rank = getattr(arguments, f"{half}_lora_r")
    if rank == 0:
        return None
    alpha = getattr(arguments, f"{half}_lora_alpha")
    return {
        "r": rank,
        "lora_alpha": rank if alpha is None else alpha,
        "lora_dropout": getattr(arguments, f"{half}_lora_dropout"),
        "target_modules": "all-linear",
    }


@dataclass
class DataArguments:
    """What is read, and how long a chunk may be."""

    train_sets: list[str] = field(
        default_factory=list,
        metadata={"help": "Folders that `revela-hub prepare` wrote, or files of the authors."},
    )
    train_weights: list[float] | None = field(
        default=None, metadata={"help": "How often groups of each set are drawn; by their sizes, if left out."}
    )
    validation_set: str | None = field(
        default=None, metadata={"help": "Prepared folder whose held-out groups are evaluated; the first train set's."}
    )
    validation_groups: int = field(default=64, metadata={"help": "At most so many held-out groups an evaluation."})
    max_length: int = field(default=160, metadata={"help": "Tokens a chunk may have in the LM."})
    retriever_max_length: int | None = field(
        default=None, metadata={"help": "Tokens a chunk may have in the retriever; max_length, if left out."}
    )
    group_size: int | None = field(
        default=None, metadata={"help": "Chunks a group: larger groups are split. As prepared, if left out."}
    )
    full_span_sources: list[str] = field(
        default_factory=list, metadata={"help": "Sources whose query side sees the whole chunk despite first_half."}
    )

    def __post_init__(self):
        check_at_least(self, validation_groups=1, max_length=2, retriever_max_length=1, group_size=2)
        check_weights(self.train_sets, self.train_weights)


def load_model(arguments: ModelArguments) -> RevelaForPreTraining:
    """Read both backbones and join them."""
    return RevelaForPreTraining.from_backbones(
        arguments.retriever_name_or_path,
        arguments.lm_name_or_path or arguments.retriever_name_or_path,
        **arguments.config_fields(),
        dtype=getattr(torch, arguments.dtype),
    )


def load_tokenizers(arguments: ModelArguments):
    """The retriever's tokenizer, which appends EOS where the pooling needs it, and the LM's own."""
    names = (arguments.retriever_name_or_path, arguments.lm_name_or_path or arguments.retriever_name_or_path)
    retriever, lm = (AutoTokenizer.from_pretrained(name, trust_remote_code=False) for name in names)
    if arguments.pooling == "eos":
        retriever = append_eos(retriever)
    return retriever, lm


def load_train_set(arguments: DataArguments, seed: int) -> Dataset:
    """All prepared sets as one, mixed by weight, split to `group_size` chunks a group."""
    names, weights = arguments.train_sets, arguments.train_weights
    if not names:
        raise ValueError("`train_sets` is empty: name at least one folder that `revela-hub prepare` wrote.")
    sets = [load_groups(name, "train") for name in names]
    if arguments.full_span_sources:
        sources = sorted({source for groups in sets for source in groups.unique("source")})
        unknown = sorted(set(arguments.full_span_sources) - set(sources))
        if unknown:
            raise ValueError(
                f"`full_span_sources` names {unknown[0]!r}, but the train sets' sources are {', '.join(sources)}."
            )
    if len(sets) > 1:
        sets = [mix_sets(sets, [len(groups) for groups in sets] if weights is None else weights, seed)]
    return split_groups(sets[0], arguments.group_size)


def load_validation_set(arguments: DataArguments) -> Dataset:
    """The held-out groups that are evaluated, split as the training's are."""
    groups = load_groups(arguments.validation_set or arguments.train_sets[0], "validation")
    groups = split_groups(groups, arguments.group_size)
    return groups.select(range(min(len(groups), arguments.validation_groups)))


def split_groups(groups: Dataset, group_size: int | None) -> Dataset:
    """Groups of more than `group_size` chunks become several; what is left over and too small is dropped."""
    if group_size is None:
        return groups
    if group_size < 2:
        raise ValueError(f"`group_size` must be at least 2, not {group_size}: a chunk needs others to attend to.")
    # Reads the lists' offsets only, not the texts.
    sizes = set(pc.list_value_length(groups.data.column("texts")).unique().to_pylist())
    if max(sizes) < group_size:
        raise ValueError(
            f"The prepared groups have {max(sizes)} chunks, fewer than group_size {group_size}: prepare them again "
            f"with --group-size {group_size}."
        )
    if sizes == {group_size}:
        return groups

    def split(batch):
        rows = {"texts": [], "doc_ids": [], "source": []}
        for texts, ids, source in zip(batch["texts"], batch["doc_ids"], batch["source"], strict=True):
            for start in range(0, len(texts) - group_size + 1, group_size):
                rows["texts"].append(texts[start : start + group_size])
                rows["doc_ids"].append(ids[start : start + group_size])
                rows["source"].append(source)
        return rows

    return groups.map(split, batched=True, remove_columns=groups.column_names, desc="Splitting groups")


def drop_blank_groups(groups: Dataset, lm_tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """
    Without the groups of which fewer than two chunks have a character, and a token of the LM, which may drop accents
    or control characters: a chunk needs another to attend to.
    """
    counts = []
    for batch in groups.select_columns("texts").with_format("arrow").iter(1000):
        texts = pa.chunked_array(batch["texts"]).combine_chunks()
        # A letter or a digit is a token to every tokenizer; of the few texts without, each is looked at.
        readable = pc.match_substring_regex(texts.flatten(), r"[\pL\pN]").to_numpy(zero_copy_only=False)
        doubtful = np.flatnonzero(~readable)
        for place, text in zip(doubtful, texts.flatten().take(doubtful).to_pylist(), strict=True):
            readable[place] = bool(text.strip() and lm_tokenizer(text)["input_ids"])
        rows = pc.list_parent_indices(texts).to_numpy()[readable]
        counts.append(np.bincount(rows, minlength=len(texts)))
    kept = np.flatnonzero(np.concatenate(counts) >= 2)
    if len(kept) == len(groups):
        return groups
    if len(kept) == 0:
        raise ValueError("No group has two chunks with a token: there is nothing to train on.")
    left_out = len(groups) - len(kept)
    say_once(f"{left_out} of {len(groups)} groups are left out: fewer than two of their chunks have a token.")
    return groups.select(kept)


def make_trainer(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: RevelaTrainingArguments,
    callbacks: list | None = None,
    trainer_class: type[RevelaTrainer] = RevelaTrainer,
) -> RevelaTrainer:
    """Data, models and tokenizers as the arguments say, put together and ready to train."""
    check_steps(args)
    cap_workers(args)
    set_seed(args.seed)

    # 1. Data: prepared groups, mixed by weight; held-out documents for validation.
    train_set = load_train_set(data_args, args.seed)
    validation = None
    if args.do_eval or args.eval_strategy != "no":
        validation = load_validation_set(data_args)

    # 2. Model and tokenizers.
    retriever_tokenizer, lm_tokenizer = load_tokenizers(model_args)
    train_set = drop_blank_groups(train_set, lm_tokenizer)
    if validation is not None:
        validation = drop_blank_groups(validation, lm_tokenizer)
    collator = GroupCollator(
        retriever_tokenizer,
        lm_tokenizer,
        max_length=data_args.max_length,
        retriever_max_length=data_args.retriever_max_length or data_args.max_length,
        query_prompt=model_args.query_prompt,
        document_prompt=model_args.document_prompt,
        similarity_span=model_args.similarity_span,
        similarity_span_ratio=model_args.similarity_span_ratio,
        full_span_sources=data_args.full_span_sources,
    )
    model = load_model(model_args)
    check_positions("retriever_max_length", collator.retriever_max_length, model.retriever)
    check_positions("max_length", collator.max_length, model.lm.backbone)
    fit_vocabulary(model.retriever, retriever_tokenizer, is_trained=not model_args.retriever_lora_r)
    fit_vocabulary(model.lm.backbone, lm_tokenizer, is_trained=not (model_args.lm_lora_r or model_args.freeze_lm))

    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=validation,
        data_collator=collator,
        callbacks=callbacks,
    )
    trainer.facts = describe_run((model_args, data_args, args), train_set)
    return trainer


def train(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: RevelaTrainingArguments,
    callbacks: list | None = None,
    trainer_class: type[RevelaTrainer] = RevelaTrainer,
) -> RevelaTrainer:
    """Train, or go on with an earlier run; the last state is left in the output folder itself."""
    resume = last_checkpoint(args)
    trainer = make_trainer(model_args, data_args, args, callbacks, trainer_class)
    trainer.run(resume)
    return trainer


def main(argv: list[str] | None = None) -> None:
    arguments = parse_recipe((ModelArguments, DataArguments, RevelaTrainingArguments), argv, description=__doc__)
    train(*arguments)


if __name__ == "__main__":
    run_script(main)
