"""Models, tokenizers and lengths that do not go together: made to fit where that can be, else an error at once."""

import json

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, RobertaConfig, RobertaModel

from hub_cards.export import export
from modeling_retromae import RetroMAEForPreTraining
from modeling_revela import RevelaForPreTraining
from tests.trainers.finetune_sets import make_encoder
from trainers import retromae
from trainers.backbones import check_positions, fit_vocabulary
from trainers.distillation import load_cross_encoder
from trainers.finetune_model import ModelArguments, load_model, save_result
from trainers.retromae_trainer import RetroMAETrainingArguments

ADDED = ["heron", "<|more|>", "zzz"]


@pytest.fixture(scope="module")
def grow(tmp_path_factory):
    """A copy of a folder whose tokenizer has three tokens more than the model embeddings."""

    def grown(folder, auto_class=AutoModel):
        out = tmp_path_factory.mktemp("grown")
        auto_class.from_pretrained(folder).save_pretrained(out)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = AutoModel.from_pretrained(folder).config.vocab_size
        # Where the embeddings have rows to spare, these are filled first.
        tokenizer.add_tokens([f"<{number}>" for number in range(rows - len(tokenizer))] + ADDED)
        tokenizer.save_pretrained(out)
        return out, rows

    return grown


def test_new_rows_begin_near_the_mean_and_are_told_of_once(grow, tiny_lm_folder, caplog):
    folder, rows = grow(tiny_lm_folder, AutoModelForCausalLM)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with caplog.at_level("WARNING", logger="trainers"):
        for _ in range(2):
            fit_vocabulary(model, tokenizer, is_trained=True)
    assert caplog.text.count(f"has {rows + 3} tokens, and the model embeddings for {rows}") == 1
    weight = model.get_input_embeddings().weight
    assert weight.shape[0] == model.config.vocab_size == rows + 3 and model.lm_head.weight is weight
    spread = weight[:rows].std(0)
    assert ((weight[rows:] - weight[:rows].mean(0)).abs() < spread).all()
    with pytest.raises(ValueError, match="the embeddings are frozen"):
        fit_vocabulary(AutoModelForCausalLM.from_pretrained(folder), tokenizer, is_trained=False)


def test_added_tokens_of_both_halves_are_trained_saved_and_exported(
    run_training, watch, grow, tiny_bert_folder, tiny_lm_folder, tmp_path
):
    (retriever, retriever_rows), (lm, lm_rows) = grow(tiny_bert_folder), grow(tiny_lm_folder, AutoModelForCausalLM)
    names = {"retriever_name_or_path": str(retriever), "lm_name_or_path": str(lm), "pooling": "mean"}
    trainer = run_training(tmp_path / "run", model=names, callbacks=[watch], max_steps=4)
    heron = AutoTokenizer.from_pretrained(lm).convert_tokens_to_ids("heron")
    name = "lm.backbone.model.embed_tokens.weight"
    assert not torch.equal(trainer.model.state_dict()[name][heron], watch.start[name][heron])
    loaded = RevelaForPreTraining.from_pretrained(tmp_path / "run")
    sizes = loaded.config.retriever_config.vocab_size, loaded.config.lm_config.vocab_size
    assert sizes == (retriever_rows + 3, lm_rows + 3)
    for key, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    export(tmp_path / "run", tmp_path / "published")
    assert SentenceTransformer(str(tmp_path / "published")).encode(["a <|more|> heron zzz"]).shape == (1, 24)


@pytest.mark.parametrize(
    ("grown", "options"),
    [("retriever", {"retriever_lora_r": 4}), ("lm", {"lm_lora_r": 4}), ("lm", {"freeze_lm": True})],
)
def test_added_tokens_that_would_not_be_trained_are_refused(
    run_training, grow, tiny_lm_folder, tmp_path, grown, options
):
    folder, _ = grow(tiny_lm_folder, AutoModelForCausalLM)
    names = {f"{half}_name_or_path": str(folder if half == grown else tiny_lm_folder) for half in ("retriever", "lm")}
    with pytest.raises(ValueError, match="the embeddings are frozen"):
        run_training(tmp_path, model=names | options)
    assert not (tmp_path / "config.json").exists()


def test_retromae_trains_added_tokens(grow, mlm_folder, sequences_folder, tmp_path):
    from transformers import AutoModelForMaskedLM

    folder, rows = grow(mlm_folder["plain"], AutoModelForMaskedLM)
    retromae.train(
        retromae.ModelArguments(str(folder), bow_loss_weight=0.1),
        retromae.DataArguments([str(sequences_folder)], max_seq_length=48),
        RetroMAETrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, max_steps=1, disable_tqdm=True, report_to="none"
        ),
    )
    loaded = RetroMAEForPreTraining.from_pretrained(tmp_path)
    assert loaded.encoder.config.vocab_size == loaded.get_input_embeddings().num_embeddings == rows + 3


def test_fine_tuning_keeps_added_tokens(grow, tmp_path):
    folder, rows = grow(make_encoder(tmp_path / "encoder"))
    save_result(load_model(ModelArguments(str(folder))), tmp_path / "out")
    model = SentenceTransformer(str(tmp_path / "out"))
    assert model.encode(["w1 heron zzz"]).shape == (1, 32)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == rows + 3
    with pytest.raises(ValueError, match="the embeddings are frozen"):
        load_model(ModelArguments(str(folder), lora_r=4))
    assert load_cross_encoder(str(folder), 32, False, "cpu", is_trained=True).model.config.vocab_size == rows + 3
    with pytest.raises(ValueError, match="a teacher"):
        load_cross_encoder(str(folder), 32, False, "cpu")


# Positions


@pytest.fixture(scope="module")
def roberta_folder(tiny_bert_folder, tmp_path_factory):
    """A RoBERTa with a table of 34 positions, the first two of which are padding's."""
    folder = tmp_path_factory.mktemp("roberta")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    tokenizer.save_pretrained(folder)
    RobertaModel(
        RobertaConfig(
            vocab_size=len(tokenizer),
            hidden_size=24,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=34,
            pad_token_id=1,
        )  # fmt: skip
    ).save_pretrained(folder)
    return folder


def test_roberta_has_fewer_positions_than_its_config_says(roberta_folder):
    model = AutoModel.from_pretrained(roberta_folder)
    check_positions("max_length", 32, model)
    with pytest.raises(ValueError, match="`max_length` is 33, but .*roberta.* has positions for 32 tokens"):
        check_positions("max_length", 33, model)


def test_revela_refuses_lengths_beyond_either_half(run_training, roberta_folder, tiny_lm_folder, tmp_path):
    names = {"retriever_name_or_path": str(roberta_folder), "lm_name_or_path": str(tiny_lm_folder)}
    pooling = {"pooling": "mean"}
    with pytest.raises(ValueError, match="`retriever_max_length` is 33, but .* 32"):
        run_training(tmp_path, model=names | pooling, data={"retriever_max_length": 33})
    with pytest.raises(ValueError, match="`max_length` is 257, but .* 256"):
        run_training(tmp_path, model=names | pooling, data={"retriever_max_length": 32, "max_length": 257})
    run_training(tmp_path, model=names | pooling, data={"retriever_max_length": 32}, max_steps=1)


def test_fine_tuning_cuts_texts_where_positions_end(roberta_folder):
    model = load_model(ModelArguments(str(roberta_folder)))
    assert model.max_seq_length == 32
    assert model.encode(["the river bank " * 40]).shape == (1, 24)


def test_decoder_whose_tokenizer_has_neither_padding_nor_eos_is_fine_tuned(tiny_lm_folder, tmp_path):
    AutoModel.from_pretrained(tiny_lm_folder).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_lm_folder, eos_token=None).save_pretrained(tmp_path)
    model = load_model(ModelArguments(str(tmp_path), pooling="mean"))
    assert model.encode(["a boat", "the river bank holds a boat"]).shape == (2, 32)
