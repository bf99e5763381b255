"""Documents into chunks of whole sentences (prose) or whole lines (code).

Revela, section 4.1 and appendix B.2: chunks of at most 120 words, each made of complete sentences.

What a *word* is. Whitespace words do not exist in Chinese or Thai, and a base64 blob is one "word" of any
length, so a chunk limited in whitespace words would have no bound. A word here is, within a run of
non-whitespace characters, each started

- 2 characters of Han, kana, Yi and everything beyond the basic plane (rare Han, emoji),
- 4 characters of Thai, Lao, Khmer, Myanmar, Tibetan and their kin,
- 32 characters of anything else, so that an ordinary word counts as one.

The averages (a Chinese word has about 1.6 characters, a Thai word about 4.5) make 120 words roughly the same
amount of text, and of tokens, in each script.

Sentences come from `sentencex` (Wikimedia, Rust, about 300 languages, no download; 40 MB of English a second).
Two of its habits are worked around here, both measured on 1.0.32: it panics on some non-ASCII spaces before an
initial, so these are shown to it as plain spaces; and its time grows with the square of the length for text
without spaces, so it sees a window at a time.
"""

import re
from collections.abc import Iterator

import regex
import sentencex

# U+3000, the ideographic space, is whitespace and therefore left out of the first range.
_TWO_A_WORD = "\u2e80-\u2fff\u3001-\u4dbf\u4e00-\ua4cf\uf900-\ufaff\ufe30-\ufe4f\uff01-\uff9f\U00010000-\U0010ffff"
_FOUR_A_WORD = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u1aaf\u1b00-\u1b7f\ua980-\ua9ff\uaa60-\uaadf"
_WORD = re.compile(
    f"[^\\s{_TWO_A_WORD}{_FOUR_A_WORD}]{{1,32}}|[{_TWO_A_WORD}]{{1,2}}|[{_FOUR_A_WORD}]{{1,4}}",
)
_ASCII_WORD = re.compile(r"\S{1,32}")
_CLUSTER = regex.compile(r"\X")
# Half a surrogate pair cannot be handed to Rust; see the module's docstring for the spaces.
_UNSAFE_FOR_SENTENCEX = re.compile("[^\\S\n\r\t ]|[\ud800-\udfff]")
_PLAIN_SENTENCE_END = re.compile(r"[.!?。！？؟।]+[\"'”’»)\]]*\s+|\n\s*\n")
_LEADING_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")
_WINDOW = 2048

Unit = tuple[int, int, int]
"""Start and end in the text, and the number of words between them."""


def count_words(text: str) -> int:
    """Number of words in `text`, by the rule in the module's docstring: defined for any script, any string.

    Sub-additive: two texts joined never count more words than the two apart.
    """
    return len((_ASCII_WORD if text.isascii() else _WORD).findall(text))


def chunk_text(text: str, kind: str = "prose", max_words: int = 120, language: str = "en") -> Iterator[str]:
    """Cut one document into chunks of at most `max_words` words (section 4.1, appendix B.2).

    Args:
        text: the document. Nothing of it is lost or reordered: the chunks joined equal the text, up to whitespace.
        kind: "prose" (a chunk is made of whole sentences) or "code" (of whole lines, indentation kept).
            A sentence or line above the limit is cut at a word; where a script has no spaces, between two
            grapheme clusters (so no accent, flag or emoji family is torn apart, unless one alone exceeds the limit).
        max_words: the limit, in words as `count_words` counts them.
        language: ISO 639 code that picks sentencex's abbreviations; the terminators of all scripts are always known.

    Yields:
        Non-empty chunks, as slices of the text without surrounding whitespace.
    """
    if len(text) <= _WINDOW and count_words(text) <= max_words:  # spares short documents most of the time
        if chunk := trim(text, kind):
            yield chunk
        return
    start = words = 0
    for unit_start, _, unit_words in units(text, kind, max_words, language):
        if words and words + unit_words > max_words:
            yield trim(text[start:unit_start], kind)
            start, words = unit_start, 0
        words += unit_words
    if words:
        yield trim(text[start:], kind)


def trim(chunk: str, kind: str) -> str:
    """The chunk without the whitespace around it, but for the indentation that a line of code begins with."""
    if kind == "code":  # the first line's indentation is part of the code
        return _LEADING_BLANK_LINES.sub("", chunk).rstrip()
    return chunk.strip()


def units(text: str, kind: str, max_words: int, language: str) -> Iterator[Unit]:
    """Sentences or lines of at most `max_words` words; each begins where the one before ends.

    What `chunk_text` and `packing.Packer` fill their pieces with; the arguments are those of `chunk_text`.
    """
    start, width = 0, _WINDOW
    while start < len(text):
        stop = min(start + width, len(text))
        found: list[Unit] = []
        position = start
        for end in _line_ends(text, start, stop) if kind == "code" else _sentence_ends(text, start, stop, language):
            found.extend(_split(text, position, end, max_words))
            position = end
        if stop < len(text):
            # The window's edge is no boundary of the text: what touches it is looked at again from its own start.
            found.pop()
            if not found:
                width *= 2
                continue
        yield from found
        start, width = found[-1][1], _WINDOW


def _line_ends(text: str, start: int, stop: int) -> Iterator[int]:
    while start < stop:
        start = text.find("\n", start, stop) + 1 or stop
        yield start


def _sentence_ends(text: str, start: int, stop: int, language: str) -> list[int]:
    """Ends of the sentences in text[start:stop], trailing whitespace included; the last one is `stop`."""
    window = text[start:stop]
    safe = window if window.isascii() else _UNSAFE_FOR_SENTENCEX.sub(" ", window)
    try:
        sentences = sentencex.segment(language, safe)
    except BaseException as error:  # a Rust panic derives from BaseException and its class cannot be imported
        if type(error).__name__ != "PanicException":
            raise
        return _plain_sentence_ends(window, start, stop)
    starts = []
    position = 0
    for sentence in sentences:
        found = safe.find(sentence, position)
        if found < 0 or safe[position:found].strip():  # it lost or changed something: do not build on it
            return _plain_sentence_ends(window, start, stop)
        if sentence.strip():
            starts.append(found)
        position = found + len(sentence)
    return [start + offset for offset in starts[1:]] + [stop]


def _plain_sentence_ends(window: str, start: int, stop: int) -> list[int]:
    ends = [start + match.end() for match in _PLAIN_SENTENCE_END.finditer(window)]
    return ends if ends and ends[-1] == stop else [*ends, stop]


def _split(text: str, start: int, end: int, max_words: int) -> list[Unit]:
    """text[start:end] as one unit, or, above the limit, as pieces cut at words."""
    words = count_words(text[start:end])
    if words <= max_words:
        return [(start, end, words)]
    pieces: list[Unit] = []
    piece_start, count = start, 0  # of the piece being filled
    space = (start, 0)  # the last cut at a space in this piece, and the words before it
    for match in _WORD.finditer(text, start, end):
        cut = match.start()
        if cut > piece_start and text[cut - 1].isspace():
            space = (cut, count)
        while count == max_words:  # twice where one cluster is above the limit
            if space[1] * 2 >= max_words:
                at, before = space
            else:  # no space in the second half of the piece
                at = cluster_start(text, piece_start, cut, end)
                before = count_words(text[piece_start:at])
            pieces.append((piece_start, at, before))
            # An upper bound for what a cut inside a word leaves, since words are counted in started portions.
            count = count - before if at == space[0] else count_words(text[at:cut])
            piece_start, space = at, (at, 0)
        count += 1
    pieces.append((piece_start, end, count))
    return pieces


def cluster_start(text: str, low: int, position: int, end: int) -> int:
    """The last start of a grapheme cluster in (low, position], else `position`: one cluster above the limit.

    `low` is the start of a cluster itself, so clusters are counted from there.
    """
    if text[low : position + 1].isascii():
        return position
    found = low
    for match in _CLUSTER.finditer(text, low, end):
        if match.start() > position:
            break
        found = match.start()
    return found if found > low else position
