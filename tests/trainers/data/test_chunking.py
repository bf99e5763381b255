import time

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainers.data.chunking import chunk_text, count_words

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
FLAG = "\U0001f1e9\U0001f1ea"


def bare(text: str) -> str:
    return "".join(text.split())


# Characters that segmenters, word counters and cluster rules trip over, apart from all the others.
TRICKY = st.lists(
    st.sampled_from(
        [*" \n\t\r\x0b\x0c\x1c\x85\u2028\u3000\xa0.?!。？…\"'()[]«»“”‘’-*19aBcé今ア한กำ؟।་။\x00"]
        + ["\u200d", "\ufe0f", "\u0301", "\ud83d", "\udc68", "👨", FAMILY, FLAG, "Dr. ", "e.g. ", "\n\n", "word "]
    ),
    max_size=300,
).map("".join)
ANY = st.text(st.characters(), max_size=300)  # every code point, halves of surrogate pairs included


@settings(max_examples=400, deadline=None)
@given(
    text=st.one_of(ANY, TRICKY, st.tuples(TRICKY, st.integers(1, 40)).map(lambda x: x[0] * x[1])),
    kind=st.sampled_from(["prose", "code"]),
    max_words=st.integers(1, 130),
)
@example(text="c\xa0A. B\xa0.\rC", kind="prose", max_words=1)
@example(text="", kind="prose", max_words=1)
@example(text="a" * 10_000, kind="code", max_words=3)
def test_nothing_is_lost_reordered_or_above_the_limit(text, kind, max_words):
    chunks = list(chunk_text(text, kind, max_words))
    assert bare("".join(chunks)) == bare(text)
    assert all(chunk.strip() for chunk in chunks)
    assert max(map(count_words, chunks), default=0) <= max_words
    position = 0
    for chunk in chunks:  # slices of the text: whitespace inside a chunk is untouched
        position = text.index(chunk, position) + len(chunk)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([FAMILY, FLAG, "e\u0301", "กำ", "か\u3099", "中", "a", "👍🏽", "한"]), max_size=400))
def test_no_cluster_is_torn(clusters):
    text = "".join(clusters)
    ends = {match.end() for match in regex.finditer(r"\X", text)}
    position = 0
    for chunk in chunk_text(text, max_words=10):
        position += len(chunk)
        assert position in ends


@settings(max_examples=300, deadline=None)
@given(st.one_of(ANY, TRICKY), st.one_of(ANY, TRICKY))
def test_counting_words_is_sub_additive(left, right):
    assert count_words(left + right) <= count_words(left) + count_words(right)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", 0),
        (" \n\u3000\t", 0),
        ("Don't count commas, twice.", 4),
        ("naïve café", 2),
        ("x" * 32, 1),
        ("x" * 33, 2),
        ("今天天气很好", 3),
        ("Python是语言", 3),
        ("สวัสดีครับ", 3),
        ("مرحبا بك", 2),
        ("한국어 문장", 2),
        ("😀😀😀", 2),
    ],
)
def test_count_words(text, words):
    assert count_words(text) == words


def test_prose_is_cut_between_sentences():
    sentences = [f"Dr. Smith paid approx. {index} dollars to the U.S. Treasury, e.g. in cash." for index in range(40)]
    chunks = list(chunk_text(" ".join(sentences), max_words=120))
    assert len(chunks) > 2
    assert [
        sentence for chunk in chunks for sentence in chunk.replace("cash. Dr.", "cash.|Dr.").split("|")
    ] == sentences
    # As many whole sentences as fit: another one would not.
    assert all(count_words(chunk) + count_words(sentences[0]) > 120 for chunk in chunks[:-1])


def test_long_sentence_is_split_at_a_word():
    words = [f"word{index}" for index in range(1000)]
    text = "A short one. " + " ".join(words) + " end. Another short one."
    chunks = list(chunk_text(text, max_words=120))
    assert chunks[0] == "A short one."
    assert " ".join(chunks).split() == text.split()


def test_code_is_cut_between_lines_and_keeps_its_indentation():
    text = "".join(f"def f{index}(x):\n    y = [x, {index}]\n\n    return  y . z\n\n\n" for index in range(100))
    chunks = list(chunk_text(text, "code", max_words=25))
    lines = [line for line in text.split("\n") if line]
    assert [line for chunk in chunks for line in chunk.split("\n") if line] == lines
    assert any(chunk.startswith("    ") for chunk in chunks)


def test_code_line_above_the_limit_is_split_at_a_word():
    chunks = list(chunk_text("x = 1\n" + "a + " * 100 + "b\ny = 2\n", "code", max_words=50))
    assert [count_words(chunk) for chunk in chunks] == [3, 50, 50, 50, 50, 4]
    assert chunks[-1] == "b\ny = 2"


@pytest.mark.parametrize(
    ("sentence", "language"),
    [
        ("今天天气很好，我们一起去公园散步吧。", "zh"),
        ("今日はとても良い天気ですね。", "ja"),
        ("كيف حالك اليوم يا صديقي العزيز؟", "ar"),
        ("यह एक बहुत अच्छा दिन है।", "hi"),
        ("Что это такое было?", "ru"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_sentences_of_other_scripts_stay_whole(sentence, language, named):
    space = "" if language in ("zh", "ja") else " "
    chunks = list(chunk_text(space.join([sentence] * 60), max_words=60, language=language if named else "en"))
    assert len(chunks) > 3
    for chunk in chunks:
        assert chunk.replace(sentence, "").strip() == ""


def test_thai_is_cut_at_spaces_and_stays_bounded():
    phrases = ["สวัสดีครับ", "ผมชื่อสมชาย", "วันนี้อากาศดีมาก"] * 200
    chunks = list(chunk_text(" ".join(phrases), max_words=40))
    assert " ".join(chunks).split() == phrases
    assert max(map(len, chunks)) <= 40 * 5


def test_unbroken_text_stays_bounded():
    assert max(map(len, chunk_text("中" * 5000))) == 240
    assert max(map(len, chunk_text("A" * 50_000))) == 120 * 32
    emoji = list(chunk_text((FAMILY + FLAG) * 1000))
    assert all(chunk.startswith((FAMILY, FLAG)) and chunk.endswith((FAMILY, FLAG)) for chunk in emoji)


def test_segmenter_is_kept_from_panicking(capfd):
    # sentencex 1.0.32 panics ("not a char boundary") on a no-break space before an initial, and prints a trace.
    text = "؟\nc““\x00\r1c*?a\u200d ।*2ก)\x85B\xa0.\r今？။1B…حa)\u200d"
    assert bare("".join(chunk_text(text, max_words=2))) == bare(text)
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize("unit", ["中文。", "中", "a", "\n", "word ", ". ", "สวัสดี", FAMILY, "e\u0301"])
@pytest.mark.parametrize("kind", ["prose", "code"])
def test_time_is_linear_in_the_length(unit, kind):
    # 0.2 s at most; sentencex alone takes 20 s for the first, since its time is quadratic.
    text = (unit * 200_000)[:200_000]
    started = time.process_time()
    list(chunk_text(text, kind))
    assert time.process_time() - started < 4
