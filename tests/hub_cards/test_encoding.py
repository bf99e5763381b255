import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from hub_cards.encoding import describe_model, encode, load_model, prompts_used


def test_each_side_gets_its_own_prompt(tiny_model):
    texts = ["a round fruit", "rails"]
    for side, prompt in (("query", "query: "), ("document", "passage: ")):
        expected = tiny_model.encode([prompt + text for text in texts])
        np.testing.assert_allclose(encode(tiny_model, texts, side).numpy(), expected, atol=1e-6)
    assert prompts_used(tiny_model) == {"query": "query: ", "document": "passage: "}


@pytest.mark.parametrize(
    "prompts, default, expected",
    [
        ({}, None, {"query": "", "document": ""}),
        ({"query": "q: ", "passage": "p: "}, None, {"query": "q: ", "document": "p: "}),
        ({"s": "both: "}, "s", {"query": "both: ", "document": "both: "}),
    ],
)
def test_prompts_used_says_what_the_model_does(tiny_path, prompts, default, expected):
    model = SentenceTransformer(tiny_path, device="cpu")
    model.prompts, model.default_prompt_name = prompts, default
    assert prompts_used(model) == expected
    for side, prompt in expected.items():
        found = encode(model, ["a tree"], side).numpy()
        np.testing.assert_allclose(found, model.encode([prompt + "a tree"], prompt=""), atol=1e-6)


def test_lengths_are_one_for_cosine_and_kept_for_dot(tiny_path):
    model = SentenceTransformer(tiny_path, device="cpu")
    del model[2]  # Normalize
    cosine = encode(model, ["a tree"], "query")
    model.similarity_fn_name = "dot"
    dot = encode(model, ["a tree"], "query")
    assert cosine.norm() == pytest.approx(1, abs=1e-5) and abs(dot.norm() - 1) > 0.1
    torch.testing.assert_close(cosine, torch.nn.functional.normalize(dot))
    model.similarity_fn_name = "euclidean"
    with pytest.raises(ValueError, match="euclidean distance"):
        encode(model, ["a tree"], "query")


def test_description(tiny_model):
    found = describe_model(tiny_model)
    assert found["max_seq_length"] == 64 and found["similarity"] == "cosine" and found["dtype"] == "float32"
    assert found["parameters"] == sum(parameter.numel() for parameter in tiny_model.parameters())


def test_a_model_that_does_not_load_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file or folder .*nowhere"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(
        ValueError, match="org/nowhere does not load as a sentence-transformers model. There is no such"
    ):
        load_model("org/nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="does not load as a sentence-transformers model. [(]"):
        load_model(tmp_path)


def test_a_raw_decoder_without_a_pad_token_encodes(tiny_lm_folder):
    model = load_model(tiny_lm_folder)
    assert encode(model, ["the boat", "the boat holds a fisher at the market"], "document").shape[0] == 2
