"""
Pre-train an encoder with RetroMAE (arXiv 2205.12035): its embedding must hold what a weak decoder needs.

    accelerate launch trainers/retromae.py retromae-bert-base-msmarco --train_sets prepared/ --output_dir out

In order:
1. Prepare text first: `revela-hub prepare SOURCE --for retromae --tokenizer ENCODER --out prepared/`.
2. Choose a recipe (a YAML file or a shipped name) and override any field on the command line.
3. Watch `decoder_accuracy` rise: the embedding says more of the text. `encoder_accuracy` is that of a masked LM, and
   `eval_sibling_ndcg_at_10` (needs a held-out share) tells whether embeddings find the rest of their document.
4. Fine-tune with `trainers/finetune.py`, or publish with `revela-hub export out/checkpoint-N retriever/`.
"""

from dataclasses import dataclass, field

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, set_seed

from modeling_retromae import RetroMAEConfig, RetroMAEForPreTraining
from trainers.arguments import parse_recipe, run_script
from trainers.backbones import check_positions, check_room, fit_vocabulary, room_taken
from trainers.checkpoints import last_checkpoint
from trainers.checks import cap_workers, check_at_least, check_dtype, check_steps, check_weights
from trainers.data.masking import RetroMAECollator
from trainers.data.prepared import load_sequences, mix_sets
from trainers.record import describe_run
from trainers.retromae_trainer import RetroMAETrainer, RetroMAETrainingArguments


@dataclass
class ModelArguments:
    """Which encoder, and what its decoder is; the fields of `RetroMAEConfig`."""

    encoder_name_or_path: str = field(
        metadata={"help": "The encoder, best with a masked-LM head (bert-base-uncased): Hub id or folder."}
    )
    decoding: str = field(
        default="enhanced",
        metadata={"help": "enhanced (every token, each from a context of its own; §3.3) or basic (masked tokens)."},
    )
    decoder_layers: int = field(default=1, metadata={"help": "Layers of the decoder; basic decoding takes up to 3."})
    decoder_query: str = field(
        default="position",
        metadata={"help": "What enhanced decoding asks with: position (RetroMAE) or embeddings (DupMAE)."},
    )
    encoder_mask_ratio: float = field(default=0.3, metadata={"help": "Share of words hidden from the encoder."})
    decoder_mask_ratio: float = field(default=0.5, metadata={"help": "Share of words hidden from the decoder."})
    bow_loss_weight: float = field(
        default=0.0, metadata={"help": "Weight of DupMAE's bag-of-words loss (the authors: 0.1); 0 for none."}
    )
    pooling: str = field(default="cls", metadata={"help": "The sentence embedding: cls (the paper) or mean."})
    dtype: str = field(
        default="float32",
        metadata={"help": "Precision of the weights in memory; keep float32 and use --bf16 for fast products."},
    )

    def __post_init__(self):
        check_dtype(self.dtype)
        RetroMAEConfig(**self.config_fields())

    def config_fields(self) -> dict:
        """The fields of `RetroMAEConfig`."""
        names = ("decoding", "decoder_layers", "decoder_query", "encoder_mask_ratio", "decoder_mask_ratio")
        return {name: getattr(self, name) for name in (*names, "bow_loss_weight", "pooling")}


@dataclass
class DataArguments:
    """What is read, and how long a sequence may be."""

    train_sets: list[str] = field(
        default_factory=list, metadata={"help": "Folders that `revela-hub prepare --for retromae` wrote."}
    )
    train_weights: list[float] | None = field(
        default=None, metadata={"help": "How often sequences of each set are drawn; by their sizes, if left out."}
    )
    validation_set: str | None = field(
        default=None,
        metadata={"help": "Prepared folder whose held-out sequences are evaluated; the first train set's."},
    )
    validation_sequences: int = field(
        default=512, metadata={"help": "At most so many held-out sequences an evaluation."}
    )
    max_seq_length: int = field(
        default=512, metadata={"help": "Tokens of a sequence at most; as prepared, or what is above is cut off."}
    )

    def __post_init__(self):
        check_at_least(self, validation_sequences=1, max_seq_length=1)
        check_weights(self.train_sets, self.train_weights)


def load_tokenizer(arguments: ModelArguments) -> PreTrainedTokenizerBase:
    """The encoder's tokenizer."""
    return AutoTokenizer.from_pretrained(arguments.encoder_name_or_path, trust_remote_code=False)


def load_model(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> RetroMAEForPreTraining:
    """Read the encoder, with embeddings for all tokens, and put a fresh decoder behind it."""
    model = RetroMAEForPreTraining.from_encoder(
        arguments.encoder_name_or_path,
        **arguments.config_fields(),
        mask_token_id=tokenizer.mask_token_id,
        dtype=getattr(torch, arguments.dtype),
    )
    fit_vocabulary(model.encoder, tokenizer, is_trained=True)
    return model


def load_train_set(arguments: DataArguments, seed: int) -> Dataset:
    """All prepared sets as one, mixed by weight."""
    names, weights = arguments.train_sets, arguments.train_weights
    if not names:
        raise ValueError("`train_sets` is empty: name at least one folder that `revela-hub prepare` wrote.")
    sets = [load_sequences(name, "train") for name in names]
    if len(sets) > 1:
        return mix_sets(sets, [len(rows) for rows in sets] if weights is None else weights, seed)
    return sets[0]


def load_validation_set(arguments: DataArguments) -> Dataset:
    """The held-out sequences that are evaluated, those of a document side by side."""
    rows = load_sequences(arguments.validation_set or arguments.train_sets[0], "validation")
    return rows.select(range(min(len(rows), arguments.validation_sequences)))


def make_trainer(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: RetroMAETrainingArguments,
    callbacks: list | None = None,
) -> RetroMAETrainer:
    """Data, model and tokenizer as the arguments say, put together and ready to train."""
    check_steps(args)
    cap_workers(args)
    set_seed(args.seed)

    # 1. Data: prepared sequences, mixed by weight; held-out documents for validation.
    train_set = load_train_set(data_args, args.seed)
    validation = None
    if args.do_eval or args.eval_strategy != "no":
        validation = load_validation_set(data_args)

    # 2. Model and tokenizer; the masks depend on the seed and an example's place in the run alone.
    tokenizer = load_tokenizer(model_args)
    check_room("max_seq_length", data_args.max_seq_length, room_taken(tokenizer))
    model = load_model(model_args, tokenizer)
    check_positions("max_seq_length", data_args.max_seq_length, model.encoder)
    collator = RetroMAECollator(
        tokenizer,
        max_length=data_args.max_seq_length,
        encoder_mask_ratio=model_args.encoder_mask_ratio,
        seed=args.seed,
    )

    trainer = RetroMAETrainer(
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
    args: RetroMAETrainingArguments,
    callbacks: list | None = None,
) -> RetroMAETrainer:
    """Train, or go on with an earlier run; the last state is left in the output folder itself."""
    resume = last_checkpoint(args)
    trainer = make_trainer(model_args, data_args, args, callbacks)
    trainer.run(resume)
    return trainer


def main(argv: list[str] | None = None) -> None:
    arguments = parse_recipe((ModelArguments, DataArguments, RetroMAETrainingArguments), argv, description=__doc__)
    train(*arguments)


if __name__ == "__main__":
    run_script(main)
