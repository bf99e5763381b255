"""RevelaModel, the retriever of a published folder, and the pooling that it shares with training."""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, LlamaModel

from modeling_revela import RevelaModel
from modeling_revela.modeling_revela import pool
from tests.modeling_revela.conftest import MAX_LENGTH

TEXTS = [
    "the boat",
    "a fisher sells fish at the market near the old bridge",
    "rivers",
    "the city keeps books on trains",
]


@pytest.fixture(scope="module")
def model(published_folder):
    return RevelaModel.from_pretrained(published_folder)


@pytest.fixture(scope="module")
def tokenizer(published_folder):
    return AutoTokenizer.from_pretrained(published_folder)


@torch.no_grad()
def embed_alone(model, tokenizer, text: str) -> torch.Tensor:
    """Straight from the stock backbone: the state of the last token, which is EOS."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ids[0, -1] == tokenizer.eos_token_id
    hidden = model.backbone(input_ids=ids).last_hidden_state[0, -1]
    return hidden / hidden.norm()


@pytest.mark.parametrize(
    ("pooling", "expected"), [("eos", [[12.0], [21.0]]), ("cls", [[10.0], [20.0]]), ("mean", [[11.0], [20.5]])]
)
def test_pool_on_either_side(pooling, expected):
    right = torch.tensor([[10.0, 11.0, 12.0, -99.0], [20.0, 21.0, -99.0, -99.0]])
    left = torch.tensor([[-99.0, 10.0, 11.0, 12.0], [-99.0, -99.0, 20.0, 21.0]])
    for hidden in (right, left):
        mask = (hidden > 0).long()
        assert pool(hidden[..., None], mask, pooling).tolist() == expected
        assert pool(hidden[..., None], mask.bool(), pooling).tolist() == expected


def test_pool_without_padding():
    hidden = torch.arange(6.0).view(1, 3, 2)
    mask = torch.ones(1, 3, dtype=torch.long)
    for pooling, expected in (("eos", [[4.0, 5.0]]), ("cls", [[0.0, 1.0]]), ("mean", [[2.0, 3.0]])):
        assert pool(hidden, mask, pooling).tolist() == expected


def test_weights_and_doors(published_folder, model):
    stock = AutoModel.from_pretrained(published_folder)
    assert type(stock) is LlamaModel
    expected = stock.state_dict()
    own = model.backbone.state_dict()
    assert set(own) == set(expected)
    assert all(torch.equal(own[name], expected[name]) for name in own)


def test_pooler_output_is_the_normalised_last_token(model, tokenizer):
    for side in ("right", "left"):
        batch = tokenizer(TEXTS, padding=True, padding_side=side, return_tensors="pt")
        with torch.no_grad():
            output = model(batch["input_ids"], batch["attention_mask"])
        assert output.last_hidden_state.shape[:2] == batch["input_ids"].shape
        for row, text in enumerate(TEXTS):
            assert (output.pooler_output[row] - embed_alone(model, tokenizer, text)).abs().max() < 1e-5


def test_no_mask_means_no_padding(model, tokenizer):
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).pooler_output, model(ids, torch.ones_like(ids)).pooler_output)


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_encode_prompts_and_keeps_the_order(model, tokenizer, batch_size):
    for encode, prompt in ((model.encode_query, "query: "), (model.encode_document, "passage: ")):
        embeddings = encode(TEXTS, batch_size=batch_size)
        assert embeddings.shape == (4, 32) and embeddings.dtype == torch.float32 and not embeddings.requires_grad
        for embedding, text in zip(embeddings, TEXTS, strict=True):
            assert (embedding - embed_alone(model, tokenizer, prompt + text)).abs().max() < 1e-5


def test_long_texts_are_cut_and_still_end_with_eos(model, tokenizer):
    long = " ".join(TEXTS * 5)
    ids = tokenizer("query: " + long)["input_ids"][: MAX_LENGTH - 1] + [tokenizer.eos_token_id]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).pooler_output
    assert (model.encode_query([long]) - expected).abs().max() < 1e-5


def test_encode_nothing(model):
    assert model.encode_query([]).shape == (0, 32)


def test_half_precision_gives_float32_embeddings(published_folder, model):
    half = RevelaModel.from_pretrained(published_folder, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    embeddings = half.encode_query(TEXTS)
    assert embeddings.dtype == torch.float32
    assert torch.allclose(embeddings.norm(dim=-1), torch.ones(4), atol=1e-5)
    assert (embeddings * model.encode_query(TEXTS)).sum(-1).min() > 0.99


def test_saved_again_it_is_the_same_folder(published_folder, model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    stock = AutoModel.from_pretrained(tmp_path)
    assert type(stock) is LlamaModel
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(stock.state_dict()[name], value), name
    assert torch.equal(RevelaModel.from_pretrained(tmp_path).encode_query(TEXTS), model.encode_query(TEXTS))


class TestErrors:
    def test_a_single_string(self, model):
        with pytest.raises(TypeError, match="list of strings"):
            model.encode_query("one text")

    def test_a_folder_that_was_not_exported(self, tiny_lm_folder):
        with pytest.raises(ValueError, match="no `revela` entry"):
            RevelaModel.from_pretrained(tiny_lm_folder)
