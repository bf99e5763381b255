"""Groups become tensors: what each side sees, where EOS goes, what is scored."""

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from hub_cards.eos_tokenizer import append_eos
from modeling_revela import RevelaForPreTraining
from trainers.data.collator import GroupCollator

LONG = "The river bank holds a boat and the boat holds a fisher who sells fish at the market."
SHORT = "A train."
GROUP = {"texts": [LONG, SHORT, "the old bridge", LONG[:30]], "doc_ids": ["a", "a", "b", "b"], "source": "wiki"}
CODE = {**GROUP, "texts": ["books on rivers", "boats trains", "the library"], "source": "code"}


@pytest.fixture
def lm_tokenizer(tiny_lm_folder):
    return AutoTokenizer.from_pretrained(tiny_lm_folder)


def test_chunks_without_a_token_of_the_lm_are_left_out(eos_tokenizer, no_accents):
    collator = GroupCollator(eos_tokenizer, no_accents)
    batch = collator([{**GROUP, "texts": [LONG, "\u0301", SHORT, "\u0301\u0302"]}])
    expected = collator([{**GROUP, "texts": [LONG, SHORT]}])
    assert batch.keys() == expected.keys() and all(torch.equal(batch[name], expected[name]) for name in batch)
    for texts in ([LONG, "\u0301"], ["\u0301", " "]):
        with pytest.raises(ValueError, match="Of a group of a, b fewer than two chunks have a token"):
            collator([GROUP, {**GROUP, "texts": texts}])


@pytest.fixture
def eos_tokenizer(tiny_lm_folder):
    return append_eos(AutoTokenizer.from_pretrained(tiny_lm_folder))


@pytest.fixture
def bert_tokenizer(tiny_bert_folder):
    return AutoTokenizer.from_pretrained(tiny_bert_folder)


@pytest.fixture
def collator(eos_tokenizer, lm_tokenizer):
    return GroupCollator(eos_tokenizer, lm_tokenizer)


def rows(batch: dict, side: str) -> list[list[int]]:
    """The real tokens of each row; padding must lie on the right."""
    prefix = f"{side}_" if side else ""
    ids, mask = batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"]
    assert ids.shape == mask.shape and (mask[:, :-1] >= mask[:, 1:]).all()
    assert mask[:, -1].any(), "padded further than to the longest"
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


def test_lm_reads_the_plain_chunk_and_scores_all_but_its_first_token(collator, lm_tokenizer):
    batch = collator([GROUP])
    expected = [lm_tokenizer(text)["input_ids"] for text in GROUP["texts"]]
    assert rows(batch, "") == expected
    labels = batch["labels"]
    assert (labels[:, 0] == -100).all()
    assert (labels[:, 1:][batch["attention_mask"][:, 1:] == 0] == -100).all()
    for row, ids in zip(labels, expected, strict=True):
        assert row[row != -100].tolist() == ids[1:]


def test_labels_keep_real_tokens_that_look_like_padding(collator, lm_tokenizer):
    assert lm_tokenizer.pad_token_id == lm_tokenizer.eos_token_id == 1
    batch = collator([{**GROUP, "texts": ["a</s>b", LONG]}])
    assert batch["labels"][0].tolist()[:3] == [-100, 1, lm_tokenizer("b")["input_ids"][0]]
    assert (batch["labels"][0, 3:] == -100).all()


def test_passage_is_prompt_and_whole_chunk_and_eos(collator, lm_tokenizer):
    expected = [[*lm_tokenizer("passage: " + text)["input_ids"], 1] for text in GROUP["texts"]]
    assert rows(collator([GROUP]), "document") == expected


@pytest.mark.parametrize("ratio", [0.5, 0.3, 0.01])
def test_query_is_a_share_of_prompt_and_chunk_and_then_eos(eos_tokenizer, lm_tokenizer, ratio):
    collator = GroupCollator(eos_tokenizer, lm_tokenizer, similarity_span_ratio=ratio)
    whole = [lm_tokenizer("query: " + text)["input_ids"] for text in GROUP["texts"]]
    expected = [[*ids[: max(1, int(ratio * len(ids)))], 1] for ids in whole]
    assert rows(collator([GROUP]), "query") == expected


def test_full_span_takes_the_whole_chunk_as_query(eos_tokenizer, lm_tokenizer):
    collator = GroupCollator(eos_tokenizer, lm_tokenizer, similarity_span="full")
    assert rows(collator([GROUP]), "query") == [
        [*lm_tokenizer("query: " + text)["input_ids"], 1] for text in GROUP["texts"]
    ]


def test_bos_counts_and_stays_at_the_front(tiny_lm_folder, lm_tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    collator = GroupCollator(append_eos(tokenizer), lm_tokenizer)
    batch = collator([GROUP])
    whole = [[0, *lm_tokenizer("query: " + text)["input_ids"]] for text in GROUP["texts"]]
    assert rows(batch, "query") == [[*ids[: len(ids) // 2], 1] for ids in whole]
    assert all(ids[0] == 0 and ids[-1] == 1 and 1 not in ids[:-1] for ids in rows(batch, "document"))


def test_bert_keeps_cls_and_gets_sep_back_and_may_have_another_vocabulary(bert_tokenizer, lm_tokenizer):
    collator = GroupCollator(bert_tokenizer, lm_tokenizer)
    batch = collator([GROUP])
    cls, sep = bert_tokenizer.cls_token_id, bert_tokenizer.sep_token_id
    for query, text in zip(rows(batch, "query"), GROUP["texts"], strict=True):
        whole = bert_tokenizer("query: " + text)["input_ids"]
        assert query == [*whole[: (len(whole) - 1) // 2], sep] and query[0] == cls
    assert rows(batch, "document") == [bert_tokenizer("passage: " + text)["input_ids"] for text in GROUP["texts"]]
    assert rows(batch, "") == [lm_tokenizer(text)["input_ids"] for text in GROUP["texts"]]
    assert "token_type_ids" not in " ".join(batch)


def test_tokenizer_without_any_suffix_is_cut_as_it_is(lm_tokenizer, tiny_lm_folder):
    collator = GroupCollator(AutoTokenizer.from_pretrained(tiny_lm_folder), lm_tokenizer)
    whole = [lm_tokenizer("query: " + text)["input_ids"] for text in GROUP["texts"]]
    assert rows(collator([GROUP]), "query") == [ids[: len(ids) // 2] for ids in whole]


@pytest.mark.parametrize("side", ["query", "document"])
@pytest.mark.parametrize("span", ["first_half", "full"])
def test_truncation_keeps_eos(eos_tokenizer, lm_tokenizer, side, span):
    collator = GroupCollator(eos_tokenizer, lm_tokenizer, max_length=7, retriever_max_length=12, similarity_span=span)
    batch = collator([GROUP])
    assert batch["input_ids"].shape[1] == 7 and batch["document_input_ids"].shape[1] == 12
    kept = {
        ("query", "first_half"): 6,
        ("query", "full"): 12,
        ("document", "first_half"): 12,
        ("document", "full"): 12,
    }
    first = rows(batch, side)[0]
    assert len(first) == kept[side, span] and first[-1] == 1 and 1 not in first[:-1]
    assert (
        first[:-1]
        == lm_tokenizer(f"{'query' if side == 'query' else 'passage'}: {LONG}")["input_ids"][: len(first) - 1]
    )


def test_sources_with_full_span_are_not_halved(eos_tokenizer, lm_tokenizer):
    collator = GroupCollator(eos_tokenizer, lm_tokenizer, full_span_sources=["code"])
    queries = rows(collator([GROUP, CODE]), "query")
    whole = [[*lm_tokenizer("query: " + text)["input_ids"], 1] for text in GROUP["texts"] + CODE["texts"]]
    assert queries[4:] == whole[4:]
    assert [len(ids) for ids in queries[:4]] == [(len(ids) - 1) // 2 + 1 for ids in whole[:4]]


def test_one_embedding_serves_both_sides_where_they_are_the_same(eos_tokenizer, lm_tokenizer):
    same = {"query_prompt": "q: ", "document_prompt": "q: "}
    full = GroupCollator(eos_tokenizer, lm_tokenizer, **same, similarity_span="full")
    assert not [name for name in full([GROUP]) if name.startswith("query")]
    by_source = GroupCollator(eos_tokenizer, lm_tokenizer, **same, full_span_sources=["code"])
    assert not [name for name in by_source([CODE]) if name.startswith("query")]
    assert "query_input_ids" in by_source([CODE, GROUP])
    assert "query_input_ids" in GroupCollator(eos_tokenizer, lm_tokenizer, similarity_span="full")([GROUP])


def test_groups_of_several_sizes_lie_one_behind_the_other(collator):
    batch = collator([GROUP, CODE, GROUP])
    assert batch["group_ids"].tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert {value.shape[0] for value in batch.values()} == {11}


def test_empty_chunks_are_left_out(collator):
    batch = collator([{**GROUP, "texts": ["", LONG, " \n", SHORT]}, CODE])
    alone = collator([{**GROUP, "texts": [LONG, SHORT]}, CODE])
    assert batch.keys() == alone.keys() and all(torch.equal(batch[name], alone[name]) for name in batch)


@pytest.mark.parametrize("side", ["lm", "retriever"])
def test_tokenizers_that_pad_on_the_left_give_the_same(collator, tiny_lm_folder, side):
    lm, retriever = (AutoTokenizer.from_pretrained(tiny_lm_folder) for _ in range(2))
    retriever = append_eos(retriever)
    (lm if side == "lm" else retriever).padding_side = "left"
    batch, expected = GroupCollator(retriever, lm)([GROUP]), collator([GROUP])
    assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_tokenizers_without_padding_token_get_one(tiny_lm_folder):
    lm, retriever = (AutoTokenizer.from_pretrained(tiny_lm_folder) for _ in range(2))
    assert lm.pad_token is retriever.pad_token is None
    GroupCollator(retriever, lm)([GROUP])
    assert lm.pad_token == retriever.pad_token == "</s>"
    lm, retriever = (AutoTokenizer.from_pretrained(tiny_lm_folder, eos_token=None) for _ in range(2))
    batch = GroupCollator(retriever, lm)([GROUP])
    assert batch["attention_mask"].sum() < batch["attention_mask"].numel() and lm.pad_token_id == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retriever_max_length": 1}, "`retriever_max_length` is 1, and prompt and special tokens take"),
        # Eight letters and EOS: all passages would be the same.
        ({"retriever_max_length": 9, "document_prompt": "xqxqxqxq"}, "`retriever_max_length` is 9, and .* take 9"),
        ({"max_length": 0}, "`max_length` is 0"),
    ],
)
def test_lengths_that_leave_nothing_of_a_text_are_errors(eos_tokenizer, lm_tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        GroupCollator(eos_tokenizer, lm_tokenizer, **options)
    if "document_prompt" in options:
        GroupCollator(eos_tokenizer, lm_tokenizer, **options | {"retriever_max_length": 10})


def test_padding_changes_nothing_for_the_model(tiny_lm_folder, collator):
    model = RevelaForPreTraining.from_backbones(tiny_lm_folder, tiny_lm_folder, similarity_temperature=0.1).eval()
    with torch.no_grad():
        batch = collator([GROUP])
        padded = collator([GROUP, {**GROUP, "texts": [LONG * 2, SHORT]}])
        alone, beside = model(**batch), model(**padded)
    assert padded["input_ids"].shape[1] > batch["input_ids"].shape[1]
    assert torch.allclose(alone.in_batch_weights, beside.in_batch_weights[:4, :4], atol=1e-5)
    assert torch.allclose(alone.document_embeddings, beside.document_embeddings[:4], atol=1e-5)
