"""
Train a retriever as REPLUG is (Revela, §B.3), the rival that distils a frozen LM: which chunk makes which more likely.

    accelerate launch trainers/replug.py replug-smollm2-135m-wikipedia --train_sets prepared/ --output_dir out

In order:
1. Prepare text first, as for Revela: `revela-hub prepare SOURCE --out prepared/`. The same folder serves both.
2. Choose a recipe (a YAML file or a shipped name) and override any field on the command line. A group of B chunks
   costs B (B - 1) sequences of the LM, of two chunks each: `lm_sequences` counts them.
3. Watch `loss` (the divergence) fall and `mean_cosine` stay below 1; `eval_sibling_ndcg_at_10` picks the checkpoint.
4. Checkpoints are Revela's with a frozen LM: publish with `revela-hub export out/checkpoint-N retriever/`.
"""

from dataclasses import dataclass, field

from trainers.arguments import parse_recipe, run_script
from trainers.checks import check_dtype, check_lora
from trainers.replug_trainer import ReplugTrainer, ReplugTrainingArguments
from trainers.revela import DataArguments, lora_fields, train


@dataclass
class ModelArguments:
    """Which two models, and how the retriever's similarities are made; the fields of `RevelaConfig` that matter."""

    retriever_name_or_path: str = field(metadata={"help": "Backbone of the retriever: Hub id or folder."})
    lm_name_or_path: str | None = field(
        default=None, metadata={"help": "The frozen causal LM: Hub id or folder. The retriever's, if left out."}
    )
    pooling: str = field(
        default="eos",
        metadata={"help": "The retriever's embedding: eos (last token; for decoders), cls or mean (for encoders)."},
    )
    retriever_lora_r: int = field(default=0, metadata={"help": "LoRA rank for the retriever; 0 trains all weights."})
    retriever_lora_alpha: int | None = field(default=None, metadata={"help": "LoRA alpha; the rank, if left out."})
    retriever_lora_dropout: float = field(default=0.0, metadata={"help": "Dropout on the retriever's adapters."})
    include_diagonal: bool = field(
        default=False,
        metadata={
            "help": "Let a chunk be its own context, as the paper's sums read. It explains itself so much better than "
            "any other does that at low temperatures nothing is learned from the others."
        },
    )
    similarity_temperature: float = field(default=1e-3, metadata={"help": "Temperature of the retriever's softmax."})
    similarity_dtype: str = field(default="float32", metadata={"help": "Precision of the similarities."})
    similarity_span: str = field(
        default="first_half",
        metadata={"help": "What the query side sees: first_half (prose) or full (code)."},
    )
    similarity_span_ratio: float = field(default=0.5, metadata={"help": "The share of tokens first_half keeps."})
    query_prompt: str = field(default="query: ", metadata={"help": "Put before a chunk as query."})
    document_prompt: str = field(default="passage: ", metadata={"help": "Put before a chunk as passage."})
    embed_batch_size: int | None = field(
        default=None, metadata={"help": "Chunks the retriever embeds at a time (gradient caching); all, if left out."}
    )
    save_backbones: bool = field(
        default=True,
        metadata={"help": "Put frozen backbone weights into checkpoints; False reads them again from their source."},
    )
    dtype: str = field(
        default="float32",
        metadata={"help": "Precision of the weights in memory; keep float32 and use --bf16 for fast products."},
    )

    freeze_lm, lm_lora_r = True, 0  # not fields: that is REPLUG

    def __post_init__(self):
        check_lora(self, "retriever_")
        check_dtype(self.dtype)

    def config_fields(self) -> dict:
        """The fields of `RevelaConfig`."""
        same = (
            "freeze_lm", "include_diagonal", "similarity_dtype", "similarity_span", "similarity_span_ratio",
            "query_prompt", "document_prompt", "embed_batch_size", "save_backbones", "pooling",
            "similarity_temperature",
        )  # fmt: skip
        return {name: getattr(self, name) for name in same} | {
            "retriever_lora": lora_fields(self, "retriever"),
        }


def main(argv: list[str] | None = None) -> None:
    classes = (ModelArguments, DataArguments, ReplugTrainingArguments)
    train(*parse_recipe(classes, argv, description=__doc__), trainer_class=ReplugTrainer)


if __name__ == "__main__":
    run_script(main)
