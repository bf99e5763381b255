import math

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from hub_cards.validation import first_part, read_groups, retrieval_gain, sibling_groups, sibling_retrieval
from modeling_revela import RevelaForPreTraining

# Chunks on a circle, in degrees: the nearest in angle ranks first.
ANGLES = {"a1": 0, "a2": 10, "a3": 40, "b1": 16, "b2": 100, "c1": 5}
GROUPS = [
    {"texts": ["a1 one two three", "b1 one two three", "c1 one two three"], "doc_ids": ["a", "b", "c"], "source": "s"},
    {"texts": ["a2 one two three", "a3 one two three", "b2 one two three"], "doc_ids": ["a", "a", "b"], "source": "s"},
]


def on_circle(texts):
    angles = torch.tensor([math.radians(ANGLES[text.split()[0]]) for text in texts])
    return torch.stack([angles.cos(), angles.sin()], dim=1).numpy()


def discount(rank):
    return 1 / math.log2(rank + 1)


def test_sibling_retrieval_by_hand():
    asked = []

    def encode_query(texts):
        asked.extend(texts)
        return on_circle(texts)

    found = sibling_retrieval(GROUPS, encode_query, on_circle)
    # Ranks of the siblings among the other five chunks: a1: 2, 4; a2: 3, 4; a3: 2, 4; b1: 5; b2: 2.
    two = discount(1) + discount(2)
    gains = [(discount(2) + discount(4)) / two, (discount(3) + discount(4)) / two, (discount(2) + discount(4)) / two]
    assert found["ndcg_at_10"] == pytest.approx((sum(gains) + discount(5) + discount(2)) / 5)
    assert found["mrr_at_10"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 2 + 1 / 5 + 1 / 2) / 5)
    assert (found["num_queries"], found["num_chunks"], found["num_without_sibling"]) == (5, 6, 1)
    assert found["num_duplicates"] == 0
    assert sorted(asked) == ["a1 one", "a2 one", "a3 one", "b1 one", "b2 one"]
    angles = list(ANGLES.values())
    pairs = [math.cos(math.radians(x - y)) for i, x in enumerate(angles) for y in angles[:i]]
    assert found["mean_cosine"] == pytest.approx(sum(pairs) / len(pairs))


def test_identical_texts_count_once_and_belong_to_each_of_their_documents():
    extra = {"texts": ["a1 one two three", "c1 one two three"], "doc_ids": ["c", "c"], "source": "s"}
    found = sibling_retrieval([*GROUPS, extra], on_circle, on_circle)
    # a1 is now in documents a and c, so c1 has a sibling.
    assert (found["num_chunks"], found["num_duplicates"], found["num_without_sibling"]) == (6, 2, 0)
    assert found["num_queries"] == 6


def test_equal_doc_ids_of_two_sources_are_two_documents():
    other = [{**GROUPS[0], "source": "other"}, GROUPS[1]]
    found = sibling_retrieval(other, on_circle, on_circle)
    assert found["num_queries"] == 2  # a2 and a3


def test_a_limit_on_queries_is_drawn_by_the_seed():
    def asked_with(seed):
        asked = []
        sibling_retrieval(
            GROUPS, lambda texts: asked.extend(texts) or on_circle(texts), on_circle, num_queries=2, seed=seed
        )
        return tuple(asked)

    assert len(asked_with(0)) == 2
    assert asked_with(0) == asked_with(0)
    assert len({asked_with(seed) for seed in range(10)}) > 1


def test_standardised_sibling_retrieval_repairs_a_shared_direction():
    # Documents are directions; two dimensions that carry nothing but a large common value hide them.
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(40, 8, generator=generator)
    vectors = (centres.repeat_interleave(2, 0) + 0.3 * torch.randn(80, 8, generator=generator)).float()
    noisy = torch.cat([vectors, 20 + 3 * torch.randn(80, 1, generator=generator)], dim=1)
    noisy = torch.nn.functional.normalize(noisy, dim=1)
    rows = [{"texts": [f"{i} w w w" for i in range(80)], "doc_ids": [str(i // 2) for i in range(80)]}]

    def encode(texts):
        return noisy[[int(text.split()[0]) for text in texts]]

    plain = sibling_retrieval(rows, encode, encode)
    standardised = sibling_retrieval(rows, encode, encode, standardised=True)
    assert plain["mean_cosine"] > 0.9 > 0.1 > standardised["mean_cosine"]
    assert standardised["ndcg_at_10"] > plain["ndcg_at_10"]


def test_nothing_to_ask_is_an_error():
    with pytest.raises(ValueError, match="hold no chunk"):
        sibling_retrieval([], on_circle, on_circle)
    with pytest.raises(ValueError, match="None of the 2 held-out chunks has a second chunk"):
        sibling_retrieval([{"texts": ["a", "b"], "doc_ids": ["1", "2"]}], on_circle, on_circle)


def test_chunks_that_all_stand_alone_are_cut_in_halves_that_find_each_other():
    def encode(texts):
        return torch.eye(3)[[("red", "green", "blue").index(text.split()[0]) for text in texts]]

    colours = ("red", "green", "blue")
    rows = [{"texts": [f"{c} one two {c} three end" for c in colours], "doc_ids": ["1", "2", "3"]}]
    found = sibling_retrieval(rows, encode, encode)
    assert (found["num_chunks"], found["num_queries"], found["num_without_sibling"]) == (6, 6, 0)
    assert found["ndcg_at_10"] == 1


@pytest.mark.parametrize(
    "text, ratio, expected",
    [
        ("one two three four", 0.5, "one two"),
        ("one two three four five", 0.5, "one two three"),
        ("  def f():\n    return a + b\n", 0.5, "def f():\n    return"),
        ("one two three four", 0.25, "one"),
        ("新しい図書館は駅前にある", 0.5, "新しい図書館"),
        ("x", 0.5, "x"),
    ],
)
def test_first_part(text, ratio, expected):
    assert first_part(text, ratio) == expected


def test_read_groups(tmp_path):
    for shard, group in enumerate(GROUPS):
        table = pyarrow.Table.from_pylist([group])
        parquet.write_table(table, tmp_path / f"validation-{shard:05}-of-00002.parquet")
    assert read_groups(tmp_path) == GROUPS
    with pytest.raises(FileNotFoundError, match=r"no train-\*\.parquet"):
        read_groups(tmp_path, "train")


def test_sequences_become_documents_and_those_of_one_are_cut_in_two_halves_to_find_each_other(tmp_path):
    rows = [
        {"text": "one two three four five six", "doc_id": "a", "source": "s"},
        {"text": "first", "doc_id": "b", "source": "s"},
        {"text": "second", "doc_id": "b", "source": "s"},
        {"text": "x", "doc_id": "a", "source": "t"},
    ]
    groups = [
        {"texts": ["one two three", "four five six"], "doc_ids": ["a", "a"], "source": "s"},
        {"texts": ["first", "second"], "doc_ids": ["b", "b"], "source": "s"},
        {"texts": ["x"], "doc_ids": ["a"], "source": "t"},
    ]
    assert sibling_groups(rows) == groups
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "validation-00000-of-00001.parquet")
    assert read_groups(tmp_path) == groups


def tiny_revela(**options) -> RevelaForPreTraining:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        attention_dropout=0.3,  # must be off while validating
    )
    return RevelaForPreTraining.from_backbones(LlamaModel(config), LlamaForCausalLM(config), **options)


def make_batch(sizes, length, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    ids = torch.randint(3, 60, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.clone(),
        "document_input_ids": ids,
        "document_attention_mask": mask,
        "query_input_ids": ids[:, : length // 2],
        "query_attention_mask": mask[:, : length // 2],
        "group_ids": torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
    }


def test_retrieval_gain_is_the_token_weighted_difference_of_the_losses():
    model = tiny_revela(similarity_temperature=0.05)
    model.train()
    batches = [make_batch([3, 2], 9, 1), make_batch([4], 5, 2)]
    found = retrieval_gain(model, batches)
    assert model.training
    model.eval().requires_grad_(False)
    own, uniform = [], []
    for batch in batches:
        own.append(float(model(**batch).loss))
        group = batch["group_ids"]
        weights = torch.zeros(len(group), len(group))
        for i in range(len(group)):
            for j in range(len(group)):
                if i != j and group[i] == group[j]:
                    weights[i, j] = 1 / (int((group == group[i]).sum()) - 1)
        uniform.append(float(model(**batch, in_batch_weights=weights).loss))
    tokens = [5 * 8, 4 * 4]
    mean_own = sum(loss * n for loss, n in zip(own, tokens, strict=True)) / sum(tokens)
    mean_uniform = sum(loss * n for loss, n in zip(uniform, tokens, strict=True)) / sum(tokens)
    assert found["num_target_tokens"] == sum(tokens)
    assert found["in_batch_loss"] == pytest.approx(mean_own)
    assert found["uniform_loss"] == pytest.approx(mean_uniform)
    assert found["retrieval_gain"] == pytest.approx(mean_uniform - mean_own)
    assert abs(found["retrieval_gain"]) > 1e-3


@pytest.mark.parametrize("options", [{}, {"include_diagonal": True}, {"dual_loss": True}])
def test_retrieval_gain_of_a_retriever_without_an_opinion_is_zero(options):
    found = retrieval_gain(tiny_revela(similarity_temperature=1e6, **options), [make_batch([3, 3], 8, 0)])
    assert found["retrieval_gain"] == pytest.approx(0, abs=1e-5)


def test_retrieval_gain_errors():
    model = tiny_revela()
    with pytest.raises(ValueError, match="no token to predict"):
        retrieval_gain(model, [])
    with pytest.raises(ValueError, match="group of one"):
        retrieval_gain(model, [make_batch([3, 1], 8, 0)])
