"""Documents into the sequences that RetroMAE reads: whole sentences, as many as fit the encoder.

The authors tokenise sentence after sentence, close a sequence once it has reached the limit and cut off what is above
it. Here a sequence is closed before the sentence that would not fit, so nothing of the corpus is cut off; only a
sentence that alone is above the limit is divided, between two words.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from tokenizers import Encoding, Tokenizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from trainers.data.chunking import Unit, cluster_start, trim, units

_UNITS_AT_A_TIME = 128
_CHARACTERS_A_TOKEN = 5  # a longer document is hardly one sequence, so it is not tokenised as a whole first


@dataclass(frozen=True)
class Packer:
    """Packs documents into sequences of whole sentences (RetroMAE, section 4.1).

    Args:
        tokenizer: Hub id or folder of the encoder's tokenizer. It must be a fast one, which masking whole words needs
            as well.
        max_seq_length: tokens of a sequence at most, the special tokens that the tokenizer adds included.
        language: ISO 639 code of the prose, as for `chunk_text`.
    """

    tokenizer: str
    max_seq_length: int
    language: str = "en"

    def __call__(self, documents: list[tuple[str, str]]) -> list[list[str]]:
        """The sequences of each document.

        Args:
            documents: text and kind ("prose" or "code": sentences or lines are kept whole) of each.

        Returns:
            For each document its sequences, in order: slices of the text of 1 to `max_seq_length` tokens. They hold
            the whole text, up to the whitespace between two. A text without a token gives none.

        Raises:
            ValueError: no such tokenizer, a slow one, or no room beside its special tokens.
        """
        backend, room = _load(self.tokenizer, self.max_seq_length)
        texts = [trim(text, kind) for text, kind in documents]
        short = [index for index, text in enumerate(texts) if len(text) <= _CHARACTERS_A_TOKEN * room]
        counts = dict(zip(short, _count(backend, [texts[index] for index in short]), strict=True))
        sequences = []
        for index, (text, (_, kind)) in enumerate(zip(texts, documents, strict=True)):
            if (count := counts.get(index, room + 1)) <= room:
                sequences.append([text] if count else [])
            else:
                sequences.append(list(self._pack(text, kind, backend, room)))
        return sequences

    def _pack(self, text: str, kind: str, backend: Tokenizer, room: int) -> Iterator[str]:
        def close() -> Iterator[str]:
            fitting = len(held)
            while True:
                sequence = trim(text[held[0][0] : held[fitting - 1][1]], kind)
                count = sum(tokens for *_, tokens in held) if adds_up else _count(backend, [sequence])[0]
                if count <= room or fitting == 1:
                    break
                fitting -= 1
            del held[:fitting]
            if count:
                yield sequence

        # BERT's words end at a space, so sentences count the same apart and together. Elsewhere a space may belong to
        # a word, and the sum be too low.
        adds_up = isinstance(backend.pre_tokenizer, BertPreTokenizer)
        held: list[Unit] = []  # of the sequence being filled; the third number counts tokens
        for unit in self._measured(text, kind, backend, room):
            while held and sum(count for *_, count in held) + unit[2] > room:
                yield from close()
            held.append(unit)
        while held:
            yield from close()

    def _measured(self, text: str, kind: str, backend: Tokenizer, room: int) -> Iterator[Unit]:
        """Sentences or lines, and pieces of those above the limit, with their number of tokens."""
        # Words first: it bounds what is tokenised at a time. A word has a token at least, but for unknown ones.
        sentences = units(text, kind, room, self.language)
        while batch := list(islice(sentences, _UNITS_AT_A_TIME)):
            counts = _count(backend, [trim(text[start:end], kind) for start, end, _ in batch])
            for (start, end, _), count in zip(batch, counts, strict=True):
                while count > room:
                    cut, before = _cut(text, start, end, kind, backend, room)
                    yield start, cut, before
                    start = cut
                    (count,) = _count(backend, [trim(text[start:end], kind)])
                yield start, end, count


def _cut(text: str, start: int, end: int, kind: str, backend: Tokenizer, room: int) -> tuple[int, int]:
    """The end of the first piece of text[start:end], which is above the limit, and the piece's number of tokens."""
    offsets = backend.encode(text[start:end], add_special_tokens=False).offsets
    for token in range(min(room, len(offsets) - 1), 0, -1):
        at = start + offsets[token][0]
        cut = at
        while cut > start + (at - start) // 2 and not text[cut - 1].isspace():
            cut -= 1
        if not text[cut - 1].isspace():  # no space in the second half
            cut = cluster_start(text, start, at, end)
        if cut > start:
            (count,) = _count(backend, [trim(text[start:cut], kind)])
            if count <= room:
                return cut, count
    (count,) = _count(backend, [text[start : start + 1]])
    return start + 1, count  # one character of more tokens than there is room for


def _count(backend: Tokenizer, texts: list[str]) -> list[int]:
    encodings: list[Encoding] = backend.encode_batch_fast(texts, add_special_tokens=False) if texts else []
    return [len(encoding) for encoding in encodings]


@lru_cache(maxsize=1)  # once a process
def _load(name: str, max_seq_length: int) -> tuple[Tokenizer, int]:
    """The tokenizer, and the tokens of text that it leaves room for."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer {name}: no tokenizer that loads, here or on the Hub ({error}).") from error
    if not tokenizer.is_fast:
        raise ValueError(f"--tokenizer {name}: not a fast tokenizer (tokenizer.json), which whole words need.")
    room = max_seq_length - tokenizer.num_special_tokens_to_add(pair=False)
    if room < 1:
        raise ValueError(f"--max-seq-length {max_seq_length} leaves no room beside the special tokens of {name}.")
    backend = tokenizer.backend_tokenizer
    # Published tokenizers may carry both, and would then count what is left of a text, or what is put to it.
    backend.no_truncation()
    backend.no_padding()
    return backend, room


__all__ = ["Packer"]
