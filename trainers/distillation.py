"""The teacher of distillation: a cross-encoder trained on hard negatives, and its scores (RetroMAE, §4.1)."""

import shutil
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import ListNetLoss
from torch import nn

from hub_cards.backbones import set_pad_token
from hub_cards.checkpoints import check_folder
from trainers.backbones import check_positions, check_room, fit_vocabulary
from trainers.finetune_data import TrainingSet
from trainers.hard_negatives import spread

# So far apart that the softmax over them is one-hot in float32.
_RELEVANT, _IRRELEVANT = 100.0, 0.0
# Arguments of the retriever's training that hold for its teacher's as well.
_SHARED = (
    "bf16",
    "fp16",
    "use_cpu",
    "seed",
    "report_to",
    "disable_tqdm",
    "logging_steps",
    "warmup_steps",
    "weight_decay",
    "gradient_checkpointing",
    "dataloader_num_workers",
    "lr_scheduler_type",
    "optim",
    "max_grad_norm",
    "ddp_timeout",
)


def train_cross_encoder(
    name_or_path: str,
    folder: Path,
    data: TrainingSet,
    negatives: torch.Tensor,
    args,
    *,
    epochs: float,
    learning_rate: float,
    batch_size: int,
    max_length: int,
    trust_remote_code: bool = False,
) -> CrossEncoder:
    """
    Train a cross-encoder to tell a query's positive from hard negatives, and leave it in `folder`.

    The loss is the cross-entropy of the positive among the query's own candidates: ListNet with one-hot targets.

    Args:
        name_or_path: the encoder that it starts from; the score's head is new.
        folder: where it is written, whole or not at all; one that is there is read and not trained again.
        negatives: (pairs, n) positions of documents, a row for each of `data.pairs`.
        args: the retriever's training arguments, whose precision, seed, schedule and reporting hold here too.
        batch_size: queries a device and forward pass, each with all its candidates.
    """
    if folder.exists():
        return load_cross_encoder(str(folder), max_length, trust_remote_code, args.device)
    count = negatives.shape[1]
    rows = Dataset.from_dict(
        {
            "query": [data.queries[query] for query, _ in data.pairs],
            "documents": [
                [data.documents[position] for position in (positive, *row)]
                for (_, positive), row in zip(data.pairs, negatives.tolist(), strict=True)
            ],
            "labels": [[_RELEVANT] + [_IRRELEVANT] * count] * len(data.pairs),
        }
    )
    model = load_cross_encoder(name_or_path, max_length, trust_remote_code, args.device, is_trained=True)
    staging = folder.with_name(f".{folder.name}.partial")
    arguments = CrossEncoderTrainingArguments(
        output_dir=str(staging),
        per_device_train_batch_size=batch_size,
        num_train_epochs=epochs,
        learning_rate=learning_rate,
        save_strategy="no",
        # Torch does not see through what a cross-encoder returns, and would take all its weights for unused.
        ddp_find_unused_parameters=False,
        **{name: getattr(args, name) for name in _SHARED},
    )
    loss = ListNetLoss(model, mini_batch_size=-1)
    CrossEncoderTrainer(model=model, args=arguments, train_dataset=rows, loss=loss).train()
    state = PartialState()
    if state.is_main_process:
        shutil.rmtree(staging, ignore_errors=True)
        model.save_pretrained(str(staging))
        staging.rename(folder)
    state.wait_for_everyone()
    return model


def load_cross_encoder(
    name_or_path: str, max_length: int, trust_remote_code: bool, device, is_trained: bool = False
) -> CrossEncoder:
    """
    A cross-encoder with one score, from a folder or Hub id; the head is drawn anew where there is none.

    Raises:
        ValueError: for files that must not be read (`check_folder`), one that does not load, has too few positions for
            `max_length`, or lacks embeddings of tokens and is not trained.
    """
    check_folder(name_or_path, trust_remote_code)
    try:
        model = CrossEncoder(
            name_or_path,
            num_labels=1,
            max_length=max_length,
            trust_remote_code=trust_remote_code,
            device=str(device),
            model_kwargs={"use_safetensors": True},
            activation_fn=nn.Identity(),
        )
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{name_or_path} does not load as a cross-encoder with one score: {reason}") from error
    if model.tokenizer.pad_token is None:
        set_pad_token(model.tokenizer)
        model.model.config.pad_token_id = model.tokenizer.pad_token_id
    # A query and a document have a token each.
    check_room("cross_encoder_max_length", max_length, 1 + model.tokenizer.num_special_tokens_to_add(pair=True))
    check_positions("cross_encoder_max_length", max_length, model.model)
    fit_vocabulary(model.model, model.tokenizer, is_trained)
    return model


def score_rows(model: CrossEncoder, data: TrainingSet, negatives: torch.Tensor, batch_size: int) -> torch.Tensor:
    """
    What the cross-encoder makes of each pair's candidates.

    Args:
        negatives: (pairs, n) positions of documents.

    Returns:
        (pairs, 1 + n) float32 scores, the positive's first; on the CPU, the same in all processes.
    """
    candidates = torch.cat([torch.tensor(data.pairs, dtype=torch.int32)[:, 1:], negatives], dim=1)
    width = candidates.shape[1]
    state = PartialState()

    def compute(first: int, last: int) -> torch.Tensor:
        texts = [
            (data.queries[query], data.documents[position])
            for (query, _), row in zip(data.pairs[first:last], candidates[first:last].tolist(), strict=True)
            for position in row
        ]
        if not texts:
            return torch.empty(0, width)
        scores = model.predict(
            texts,
            batch_size=batch_size,
            convert_to_tensor=True,
            activation_fn=nn.Identity(),
            show_progress_bar=state.is_main_process and len(texts) > 100 * batch_size,
        )
        return scores.float().view(-1, width)

    return spread(len(data.pairs), compute, state).cpu()


__all__ = ["load_cross_encoder", "score_rows", "train_cross_encoder"]
