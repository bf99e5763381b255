"""The contrastive rival as a whole: pairs from prepared groups, training, and the retriever that is left."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import TrainerCallback

from trainers import contriever
from trainers.arguments import parse_recipe
from trainers.contriever import PairArguments, load_train_set, load_validation_set, train
from trainers.data.prepared import load_groups
from trainers.finetune_model import ModelArguments
from trainers.finetune_trainer import FinetuneTrainingArguments

CLASSES = (ModelArguments, PairArguments, FinetuneTrainingArguments)


@pytest.fixture(scope="module")
def run(prepared_folder, tiny_lm_folder, tmp_path_factory):
    """A run on the tiny decoder with LoRA, with the paper's pooling and prompts, and its output folder."""
    out = tmp_path_factory.mktemp("contriever") / "run"
    arguments = [
        *("--model_name_or_path", str(tiny_lm_folder), "--train_sets", str(prepared_folder)),
        *("--pooling", "eos", "--query_prompt", "query: ", "--document_prompt", "passage: "),
        *("--max_length", "48", "--lora_r", "8", "--learning_rate", "3e-3", "--num_train_epochs", "12"),
        *("--per_device_train_batch_size", "16", "--eval_strategy", "epoch", "--eval_on_start", "true"),
        *("--use_cpu", "true", "--output_dir", str(out), "--save_strategy", "no", "--report_to", "none"),
        *("--disable_tqdm", "true", "--logging_steps", "2"),
    ]
    return train(*parse_recipe(CLASSES, arguments)), out


def test_it_learns_to_find_the_passages_of_held_out_documents(run):
    history = run[0].state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    ndcg = [entry["eval_dev_cosine_ndcg@10"] for entry in history if "eval_dev_cosine_ndcg@10" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert max(ndcg[1:]) > ndcg[0]


def test_the_output_folder_is_a_retriever_with_the_prompts_and_eos(run):
    model = SentenceTransformer(str(run[1]), device="cpu")
    assert model.prompts["query"] == "query: " and model.prompts["document"] == "passage: "
    assert model.tokenizer("a boat")["input_ids"][-1] == model.tokenizer.eos_token_id
    embedding = model.encode_query(["a boat"], convert_to_tensor=True)
    assert torch.allclose(embedding.norm(dim=-1), torch.ones(1))


def test_pairs_come_from_the_split_they_are_for(prepared_folder):
    arguments = PairArguments(train_sets=[str(prepared_folder)])
    data, held_out = load_train_set(arguments, seed=0), load_validation_set(arguments, seed=0)
    texts = {
        split: " ".join(text for group in load_groups(prepared_folder, split) for text in group["texts"])
        for split in ("train", "validation")
    }
    assert all(query in texts["train"] for query in data.queries)
    assert all(query in texts["validation"] for query in held_out.queries.values())
    assert set(held_out.relevant) == set(held_out.queries)


def test_weights_choose_how_much_comes_of_each_set(prepared_folder):
    folder = str(prepared_folder)
    both = load_train_set(PairArguments(train_sets=[folder, folder], train_weights=[1, 1]), seed=0)
    assert len(both.pairs) > len(load_train_set(PairArguments(train_sets=[folder]), seed=0).pairs)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"inverse_cloze": -0.1}, "`inverse_cloze`"),
        ({"cloze_unit": ["word"]}, "No unit 'word'"),
        ({"train_sets": ["a"], "cloze_unit": ["line", "sentence"]}, "has 2 values for 1 `train_sets`"),
        ({"temperature": 0.0}, "`temperature`"),
        ({"train_sets": ["a"], "train_weights": [1.0, 2.0]}, "`train_weights`"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        PairArguments(**options)


def test_each_set_has_its_own_cloze_unit(tmp_path):
    prose, code = tmp_path / "prose.jsonl", tmp_path / "code.jsonl"
    prose.write_text(json.dumps(["One day\nit rained. Then the sun\ncame out again.", "And"]) + "\n")
    code.write_text(json.dumps(["total = a + b\nreturn total + c", "pass"]) + "\n")
    arguments = PairArguments(train_sets=[str(prose), str(code)], cloze_unit=["sentence", "line"], inverse_cloze=1.0)
    queries = set(load_train_set(arguments, seed=0).queries)
    assert queries <= {"One day\nit rained.", "Then the sun\ncame out again.", "total = a + b", "return total + c"}
    assert len(queries) == 2


def test_no_sets_and_sets_without_a_pair_are_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="`train_sets` is empty"):
        load_train_set(PairArguments(), seed=0)
    file = tmp_path / "groups.jsonl"
    file.write_text('["One.", "Two."]\n')
    with pytest.raises(ValueError, match="No pair can be cut from .*groups.jsonl"):
        load_train_set(PairArguments(train_sets=[str(file)], inverse_cloze=1.0), seed=0)


def test_the_script_teaches(capsys):
    with pytest.raises(SystemExit):
        contriever.main(["--help"])
    shown = capsys.readouterr().out
    assert "inverse cloze" in shown and "--cloze_unit" in shown


def test_sigterm_leaves_a_checkpoint_that_the_same_data_goes_on_from(tiny_lm_folder, prepared_folder, tmp_path):
    class Told(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(folder, callbacks=None, inverse_cloze=0.5, **options):
        args = FinetuneTrainingArguments(
            output_dir=str(folder),
            max_steps=4,
            per_device_train_batch_size=2,
            save_strategy="no",
            use_cpu=True,
            report_to="none",
            **options,
        )
        pairs = PairArguments(train_sets=[str(prepared_folder)], inverse_cloze=inverse_cloze)
        train(ModelArguments(str(tiny_lm_folder), pooling="eos", lora_r=2, max_length=48), pairs, args, callbacks)
        return load_file(folder / "model.safetensors")

    whole = run(tmp_path / "whole")
    with pytest.raises(SystemExit) as left:
        run(tmp_path / "told", [Told()])
    assert left.value.code == 143 and (tmp_path / "told" / "checkpoint-2").is_dir()
    with pytest.raises(ValueError, match="had data"):
        run(tmp_path / "told", inverse_cloze=0.9, resume_from_checkpoint="true")
    resumed = run(tmp_path / "told", resume_from_checkpoint="true")
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, msg=name)
