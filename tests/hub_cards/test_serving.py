"""What the servers would say of a folder, each rule broken once on a folder that passes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from hub_cards.doors import write_doors
from hub_cards.eos_tokenizer import append_eos
from hub_cards.export import publish
from hub_cards.serving import check_serving
from modeling_revela import RevelaForPreTraining


@pytest.fixture(scope="module")
def published(tiny_lm_folder, tiny_bert_folder, tmp_path_factory):
    """ "llama" (EOS pooling), "bert" (cls) and "retromae" (BERT with its masked-LM head), as export writes them."""
    folders = {}
    for name, source, pooling in (("llama", tiny_lm_folder, "eos"), ("bert", tiny_bert_folder, "cls")):
        model = RevelaForPreTraining.from_backbones(str(source), str(tiny_lm_folder), pooling=pooling)
        tokenizer = AutoTokenizer.from_pretrained(source)
        folders[name] = tmp_path_factory.mktemp("published") / name
        folders[name].mkdir()
        publish(model, append_eos(tokenizer) if pooling == "eos" else tokenizer, folders[name], torch.float32)
    from transformers import BertConfig, BertForMaskedLM

    folders["retromae"] = tmp_path_factory.mktemp("published") / "retromae"
    folders["retromae"].mkdir()
    config = BertConfig.from_pretrained(tiny_bert_folder)
    options = {"pooling": "cls", "dtype": torch.float32, "max_length": 64}
    write_doors(
        BertForMaskedLM(config), AutoTokenizer.from_pretrained(tiny_bert_folder), folders["retromae"], **options
    )
    return folders


@pytest.fixture
def change(published, tmp_path):
    """A copy of a folder with one JSON file changed; verdicts of it by server."""

    def run(name, file=None, **fields):
        shutil.copytree(published[name], tmp_path / "copy")
        if file is not None:
            path = tmp_path / "copy" / file
            value = json.loads(path.read_text())
            value = {key: field for key, field in (value | fields).items() if field != "gone"}
            path.write_text(json.dumps(value))
        return tmp_path / "copy"

    return run


def verdicts(folder):
    tei, vllm = check_serving(folder)
    return tei, vllm


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_what_export_writes_is_served_by_both(published, name):
    tei, vllm = verdicts(published[name])
    assert (tei.problems, vllm.problems) == ([], [])
    assert any("GPU" in note for note in tei.notes) == (name == "llama")
    assert any('"query: " or "passage: "' in note for note in vllm.notes)


def test_a_masked_lm_head_is_no_hindrance_to_tei_and_one_to_vllm(published):
    tei, vllm = verdicts(published["retromae"])
    assert tei.serves
    assert vllm.problems == [
        "the architecture 'BertForMaskedLM' is not among its embedding models: save it without its head, as BertModel"
    ]


@pytest.mark.parametrize(
    ("name", "file", "fields", "servers", "message"),
    [
        ("llama", "config.json", {"rope_theta": "gone"}, "tei", "config.json lacks `rope_theta`"),
        ("llama", "config.json", {"rope_scaling": {"rope_type": "llama3"}}, "tei", "scaled rotary positions"),
        ("llama", "config.json", {"head_dim": 16}, "tei", "a `head_dim` other than hidden_size / heads, 8"),
        ("llama", "config.json", {"pad_token_id": None}, "tei", "`pad_token_id` that is no number"),
        ("llama", "config.json", {"model_type": "gpt_neox"}, "tei", "model_type 'gpt_neox' is none of those"),
        (
            "llama",
            "config.json",
            {"architectures": ["T5Model"]},
            "vllm",
            "'T5Model' is not among its embedding models",
        ),
        ("bert", "1_Pooling/config.json", {"pooling_mode_cls_token": "gone"}, "both", "lacks pooling_mode_cls_token"),
        (
            "bert",
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True},
            "tei",
            "bert is not pooled by lasttoken there",
        ),
        ("bert", "sentence_bert_config.json", {"max_seq_length": "gone"}, "both", "lacks max_seq_length"),
    ],
)
def test_each_rule_is_told_of(change, name, file, fields, servers, message):
    tei, vllm = verdicts(change(name, file, **fields))
    told = {"tei": tei, "vllm": vllm}
    for server, verdict in told.items():
        found = any(message in problem for problem in verdict.problems)
        assert found == (servers in (server, "both")), (server, verdict)


def test_files_in_the_form_of_sentence_transformers_6_are_told_of(change):
    folder = change("bert")
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
    (folder / "modules.json").write_text(json.dumps(modules))
    for verdict in verdicts(folder):
        assert any("modules.json names no sentence_transformers.models.Pooling" in text for text in verdict.problems)


def test_eos_and_names_of_weights_and_missing_files_are_told_of(change):
    folder = change("llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": value for name, value in weights.items()}, folder / "model.safetensors")
    tei, vllm = verdicts(folder)
    assert any("appends no EOS" in text for text in vllm.problems)
    assert any("the weights have no embed_tokens.weight" in text for text in tei.problems)
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").unlink()
    tei, _ = verdicts(folder)
    assert any("no tokenizer.json" in text for text in tei.problems)
    assert any("no safetensors" in text for text in tei.problems)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is no JSON"):
        check_serving(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="it has no config.json"):
        check_serving(folder)


def test_trained_sizes_are_named(published, tiny_bert_folder, tiny_lm_folder, tmp_path):
    model = RevelaForPreTraining.from_backbones(
        str(tiny_bert_folder), str(tiny_lm_folder), pooling="cls", matryoshka_dims=[6, 12]
    )
    publish(model, AutoTokenizer.from_pretrained(tiny_bert_folder), tmp_path, torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["matryoshka_dimensions"] == [6, 12, 24]
    assert '"dimensions" in a request may be 6, 12, 24' in verdicts(tmp_path)[1].notes
    assert "matryoshka_dimensions" not in json.loads((published["bert"] / "config.json").read_text())


def test_truncated_embeddings_of_a_published_folder_are_slices_of_length_one(published):
    from sentence_transformers import SentenceTransformer

    texts = ["the river", "a boat at the bridge"]
    for name in ("llama", "bert"):
        whole = SentenceTransformer(str(published[name]), device="cpu").encode_query(texts, convert_to_tensor=True)
        short = SentenceTransformer(str(published[name]), device="cpu", truncate_dim=5)
        found = short.encode_query(texts, convert_to_tensor=True, normalize_embeddings=True)
        torch.testing.assert_close(found, torch.nn.functional.normalize(whole[:, :5], dim=-1))


def test_the_command_says_so_in_lines(published):
    from typer.testing import CliRunner

    from revela_hub import app

    result = CliRunner().invoke(app, ["serve-check", str(published["bert"])])
    assert result.exit_code == 0 and "text-embeddings-inference: yes\n" in result.output
    assert "vLLM: yes\n" in result.output and '"prompt_name": "query" or "document"' in result.output
