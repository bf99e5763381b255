import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainers.data.packing import Packer


@pytest.fixture(scope="module")
def folders(tiny_bert_folder, tiny_lm_folder, tmp_path_factory):
    """Tokenizers of three kinds: WordPiece (2 special tokens), byte-level BPE (none), and sentence pieces."""
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), *((letter, -1.0) for letter in "▁abcdefghi.")], unk_id=0))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    folder = tmp_path_factory.mktemp("pieces")
    PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="<unk>").save_pretrained(folder)
    return {"wordpiece": tiny_bert_folder, "bytes": tiny_lm_folder, "pieces": folder}


def length(folder, text: str) -> int:
    return len(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


def words_of(texts) -> list[str]:
    return " ".join(texts).split()


@pytest.mark.parametrize("name", ["wordpiece", "bytes", "pieces"])
@pytest.mark.parametrize("limit", [24, 100])
def test_sequences_are_whole_sentences_as_many_as_fit(folders, name, limit):
    sentences = [f"The river bank {'holds a boat ' * (number % 3)}at the city." for number in range(60)]
    if name != "wordpiece":
        sentences = [f"A cab{' hid' * (number % 3)} beef." for number in range(60)]  # short tokens
    text = " ".join(sentences)
    (sequences,) = Packer(str(folders[name]), limit)([(text, "prose")])
    assert " ".join(sequences) == text and len(sequences) > 2
    for sequence, following in zip(sequences, [*sequences[1:], None], strict=True):
        assert sequence.endswith(".")
        assert length(folders[name], sequence) <= limit
        if following:
            sentence = following.partition(".")[0] + "."
            # A word may count one token more alone than behind a space.
            assert length(folders[name], f"{sequence} {sentence}") > limit - (name != "wordpiece")


def test_documents_that_fit_stay_one_sequence_and_blank_ones_give_none(tiny_bert_folder):
    packer = Packer(str(tiny_bert_folder), 16)
    assert packer([("  the river. The boat.\n", "prose"), (" \n", "prose"), ("", "code")]) == [
        ["the river. The boat."], [], [],
    ]  # fmt: skip
    assert packer([]) == []


def test_a_sentence_above_the_limit_is_divided_between_words(tiny_bert_folder):
    text = "the river " * 50 + "ends. The boat."
    (sequences,) = Packer(str(tiny_bert_folder), 12)([(text, "prose")])
    assert " ".join(sequences).split() == text.split()
    assert sequences[0] == "the river " * 4 + "the river"
    assert all(length(tiny_bert_folder, sequence) <= 12 for sequence in sequences)


def test_lines_of_code_stay_whole_and_keep_their_indentation(tiny_lm_folder):
    text = "".join(f"    def f{number}(self):\n        return {number}\n\n" for number in range(30))
    (sequences,) = Packer(str(tiny_lm_folder), 120)([(text, "code")])
    assert len(sequences) > 3
    assert [line for sequence in sequences for line in sequence.splitlines() if line] == [
        line for line in text.splitlines() if line
    ]


@settings(deadline=None, max_examples=60)
@given(
    text=st.text(alphabet=st.sampled_from("ab. \n\té中👨‍👩‍👧ก\u0301\u200d"), max_size=200), limit=st.integers(6, 20),
    name=st.sampled_from(["wordpiece", "bytes", "pieces"]),
)  # fmt: skip
def test_any_text_is_kept_whole_within_the_limit(folders, text, limit, name):
    (sequences,) = Packer(str(folders[name]), limit)([(text, "prose")])
    assert all(0 < length(folders[name], sequence) <= limit for sequence in sequences)
    # BERT's normaliser drops accents and joiners, so a piece of these alone has no token and is left out.
    dropped = "\u0301\u200d" if name == "wordpiece" else ""
    joined, kept = ("".join("".join(each).split()) for each in (sequences, text))
    assert joined.translate({ord(c): None for c in dropped}) == kept.translate({ord(c): None for c in dropped})


def test_truncation_and_padding_of_a_published_tokenizer_change_nothing(tiny_bert_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    tokenizer.save_pretrained(tmp_path)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.truncation["max_length"] == 8
    text = " ".join(["The river bank holds a boat at the city."] * 9)
    expected = Packer(str(tiny_bert_folder), 40)([(text, "prose")])
    assert Packer(str(tmp_path), 40)([(text, "prose")]) == expected
    assert len(expected[0]) == 3


def test_tokenizers_that_cannot_be_used_are_errors_that_name_them(tiny_bert_folder, tmp_path):
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}: no tokenizer that loads"):
        Packer(str(tmp_path), 16)([("a", "prose")])
    with pytest.raises(ValueError, match="--max-seq-length 2 leaves no room"):
        Packer(str(tiny_bert_folder), 2)([("a", "prose")])
