"""Groups of chunks -> the tensors of a Revela step, in the tokens of both halves."""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from hub_cards.backbones import set_pad_token
from trainers.backbones import check_room, room_taken


@dataclass
class GroupCollator:
    """
    Tokenise whole groups for `RevelaForPreTraining`.

    As in the authors' code: prompts go before the text, the retriever's tokenizer appends EOS, and the first half is a
    share of the query's tokens, prompt included, with EOS after it. The LM reads the plain chunk, all of which is
    scored. (The paper's text has capitalised prompts, and the code pads every chunk to 160 tokens; padding to the
    longest of the batch gives the same numbers for less work.)

    Args:
        retriever_tokenizer: appends its own special tokens, EOS included where the pooling is `eos`.
        lm_tokenizer: the LM's own, without EOS.
        max_length: tokens a chunk may have for the LM.
        retriever_max_length: tokens a chunk may have for the retriever, special tokens included.
        query_prompt, document_prompt: put before the text of either side.
        similarity_span: `first_half` or `full`; what the query side sees.
        similarity_span_ratio: the share of the tokens that `first_half` keeps.
        full_span_sources: sources whose chunks are seen in full whatever `similarity_span` says (the authors do so
            for code in the mixed run).

    Raises:
        ValueError: for a length that prompt and special tokens take all of.
    """

    retriever_tokenizer: PreTrainedTokenizerBase
    lm_tokenizer: PreTrainedTokenizerBase
    max_length: int = 160
    retriever_max_length: int = 160
    query_prompt: str = "query: "
    document_prompt: str = "passage: "
    similarity_span: str = "first_half"
    similarity_span_ratio: float = 0.5
    full_span_sources: list[str] = field(default_factory=list)

    def __post_init__(self):
        for tokenizer in (self.retriever_tokenizer, self.lm_tokenizer):
            set_pad_token(tokenizer)
        check_room("max_length", self.max_length, room_taken(self.lm_tokenizer))
        prompts = self.query_prompt, self.document_prompt
        check_room("retriever_max_length", self.retriever_max_length, room_taken(self.retriever_tokenizer, prompts))
        probe = self.retriever_tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
        # Special tokens after the text: EOS, SEP, or none.
        self._suffix = len(probe) - 1 - max(i for i, special in enumerate(probe) if not special)

    def __call__(self, groups: list[dict]) -> dict[str, torch.Tensor]:
        """
        Args:
            groups: rows of a prepared set, each with `texts` and `source`. Chunks without a character, or without a
                token of the LM, are left out: there is nothing to embed or predict.

        Returns:
            `input_ids`, `attention_mask`, `labels` (B, L); `document_input_ids`, `document_attention_mask` (B, L_d);
            `query_input_ids`, `query_attention_mask` (B, L_q), left out where both sides are the same; `group_ids`
            (B,). B counts the chunks of all groups.

        Raises:
            ValueError: naming a group of which fewer than two chunks are left.
        """
        chunks = [self.readable(group["texts"]) for group in groups]
        for group, left in zip(groups, chunks, strict=True):
            if len(left) < 2:
                raise ValueError(
                    f"Of a group of {', '.join(dict.fromkeys(group['doc_ids']))} fewer than two chunks have a token; "
                    "each needs another to attend to: remove it."
                )
        texts = [text for group in chunks for text, _ in group]
        sizes = torch.tensor([len(group) for group in chunks])
        lm = self.lm_tokenizer.pad(
            {"input_ids": [ids for group in chunks for _, ids in group]}, padding_side="right", return_tensors="pt"
        )
        labels = lm["input_ids"].masked_fill(lm["attention_mask"] == 0, -100)
        # The first token is predicted from nothing: leaving it out makes the Trainer's count of targets exact.
        labels[:, 0] = -100
        batch = {"input_ids": lm["input_ids"], "attention_mask": lm["attention_mask"], "labels": labels}
        batch["group_ids"] = torch.arange(len(groups)).repeat_interleave(sizes)

        batch.update(self._pad("document", self._encode(self.document_prompt, texts)))
        halved = [
            self.similarity_span == "first_half" and group.get("source") not in self.full_span_sources
            for group, size in zip(groups, sizes.tolist(), strict=True)
            for _ in range(size)
        ]
        if any(halved) or self.query_prompt != self.document_prompt:
            queries = self._encode(self.query_prompt, texts)
            queries = [self._first_part(ids) if half else ids for ids, half in zip(queries, halved, strict=True)]
            batch.update(self._pad("query", queries))
        return batch

    def readable(self, texts: list[str]) -> list[tuple[str, list[int]]]:
        """The texts that have a character and a token of the LM, with their tokens."""
        texts = [text for text in texts if text.strip()]
        if not texts:
            return []
        tokens = self.lm_tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"]
        return [(text, ids) for text, ids in zip(texts, tokens, strict=True) if ids]

    def _encode(self, prompt: str, texts: list[str]) -> list[list[int]]:
        return self.retriever_tokenizer(
            [prompt + text for text in texts], truncation=True, max_length=self.retriever_max_length
        )["input_ids"]

    def _first_part(self, ids: list[int]) -> list[int]:
        body, suffix = ids[: len(ids) - self._suffix], ids[len(ids) - self._suffix :]
        return body[: max(1, int(len(body) * self.similarity_span_ratio))] + suffix

    def _pad(self, side: str, ids: list[list[int]]) -> dict[str, torch.Tensor]:
        padded = self.retriever_tokenizer.pad(
            {"input_ids": ids}, padding=True, padding_side="right", return_tensors="pt"
        )
        return {f"{side}_{name}": padded[name] for name in ("input_ids", "attention_mask")}


__all__ = ["GroupCollator"]
