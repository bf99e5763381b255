"""Prepared sets of the suite's texts, and training runs of a few steps on the tiny models."""

import gc
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import normalizers
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM, TrainerCallback

from trainers.data.prepare import PrepareConfig, prepare
from trainers.revela import DataArguments, ModelArguments, train
from trainers.revela_trainer import RevelaTrainer, RevelaTrainingArguments


@pytest.fixture(scope="session", autouse=True)
def datasets_cache_of_session(tmp_path_factory):
    """Arrow caches go where pytest cleans up, not to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets-cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def little_to_collect():
    """Each run of a Trainer collects garbage; what the imports made would be half of the run's time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def prepared_folder(text_folder, tmp_path_factory) -> Path:
    """Ten documents as groups of four chunks: 23 groups to train on and 10 held out."""
    texts = tmp_path_factory.mktemp("ten-texts")
    for file in sorted(text_folder.iterdir())[:10]:
        (texts / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    out = tmp_path_factory.mktemp("groups") / "prepared"
    prepare(PrepareConfig(source=str(texts), out=str(out), group_size=4, max_words=30, validation_share=0.3))
    return out


@pytest.fixture(scope="session")
def mlm_folder(tiny_bert_folder, tmp_path_factory):
    """The tiny BERT with a masked-LM head, without and with dropout, as folders."""

    def make(name: str, dropout: float) -> Path:
        folder = tmp_path_factory.mktemp(name)
        shutil.copytree(tiny_bert_folder, folder, dirs_exist_ok=True)
        config = AutoModelForMaskedLM.from_pretrained(tiny_bert_folder).config
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
        torch.manual_seed(3)
        BertForMaskedLM(config).save_pretrained(folder)
        return folder

    return {"plain": make("plain-mlm", 0.0), "dropout": make("dropout-mlm", 0.1)}


@pytest.fixture(scope="session")
def sequences_folder(text_folder, tiny_bert_folder, tmp_path_factory) -> Path:
    """Ten documents as sequences of at most 48 tokens."""
    texts = tmp_path_factory.mktemp("ten-texts-for-sequences")
    for file in sorted(text_folder.iterdir())[:10]:
        (texts / file.name).write_text(file.read_text(encoding="utf-8")[:900], encoding="utf-8")
    out = tmp_path_factory.mktemp("sequences") / "prepared"
    config = PrepareConfig(
        str(texts), str(out), "retromae", tokenizer=str(tiny_bert_folder), max_seq_length=48, validation_share=0.3
    )
    prepare(config)
    return out


@pytest.fixture(scope="session")
def no_accents(tiny_lm_folder):
    """A tokenizer to which accents alone are nothing."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    return tokenizer


class Watch(TrainerCallback):
    """Keeps what the parameters were at the start, and what each forward pass of the training was asked for."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.start = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.asked = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module, args, kwargs):
        if module.training:  # and not for the model card's picture
            self.asked.append(kwargs)


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="session")
def run_training(tiny_lm_folder, prepared_folder):
    """Trains the tiny Llama as both halves for a few steps; options of the three config classes override."""

    def run(output_dir: Path, model=None, data=None, callbacks=None, **training) -> RevelaTrainer:
        model = {
            "retriever_name_or_path": str(tiny_lm_folder),
            "similarity_temperature": 0.01,
            "in_batch_gate": True,
        } | (model or {})
        data = {"train_sets": [str(prepared_folder)], "max_length": 96, "validation_groups": 6} | (data or {})
        training = {
            "output_dir": str(output_dir),
            "use_cpu": True,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "report_to": "none",
        } | training
        return train(
            ModelArguments(**model), DataArguments(**data), RevelaTrainingArguments(**training), callbacks=callbacks
        )

    return run


@pytest.fixture(scope="session")
def logged():
    """The values of one key in a trainer's log, one a logged step."""

    def values(trainer: RevelaTrainer, name: str) -> list[float]:
        return [entry[name] for entry in trainer.state.log_history if name in entry]

    return values


@pytest.fixture(scope="session")
def lora() -> dict:
    """Options for adapters on both halves."""
    return {"retriever_lora_r": 4, "lm_lora_r": 4}


@pytest.fixture(scope="session")
def weights():
    """A copy of a trainer's weights by name."""

    def copy(trainer: RevelaTrainer) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}

    return copy
