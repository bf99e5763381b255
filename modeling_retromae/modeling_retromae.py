"""RetroMAE: a stock encoder with a masked-LM head, and a decoder that rebuilds its input from its embedding."""

import copy
import inspect
import os
import warnings
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from .configuration_retromae import RetroMAEConfig, require_stock
from .decoder import RetroMAEDecoder
from .decoder_visibility import sample_hidden, sample_visibility

# Logits held at a time: 2^24 float32 numbers, 64 MiB.
_CHUNK_ELEMENTS = 2**24
# What `from_encoder` passes on to `from_pretrained`.
_LOADING = {"dtype", "revision", "token"}


@dataclass
class RetroMAEOutput(ModelOutput):
    """
    Output of [`RetroMAEForPreTraining`]. Losses are in nats; what was not asked for is `None`.

    Args:
        loss: `encoder_loss + decoder_loss + bow_loss_weight * bow_loss`, scalar.
        encoder_loss: masked-LM loss of the encoder, detached.
        decoder_loss: loss of rebuilding the input (Eq. 3 or 6), detached.
        bow_loss: DupMAE's bag-of-words loss, detached.
        sentence_embedding: (B, d), not normalised.
        encoder_accuracy, decoder_accuracy: share of the predicted tokens whose likeliest token is the right one.
        num_encoder_tokens, num_decoder_tokens: tokens predicted in this call, int64 scalars.
    """

    loss: torch.Tensor | None = None
    encoder_loss: torch.Tensor | None = None
    decoder_loss: torch.Tensor | None = None
    bow_loss: torch.Tensor | None = None
    sentence_embedding: torch.Tensor | None = None
    encoder_accuracy: torch.Tensor | None = None
    decoder_accuracy: torch.Tensor | None = None
    num_encoder_tokens: torch.Tensor | None = None
    num_decoder_tokens: torch.Tensor | None = None


class RetroMAEForPreTraining(PreTrainedModel):
    """
    Encoder and decoder in one module, trained by L_enc + L_dec (Algorithm 1).

    ```python
    model = RetroMAEForPreTraining.from_encoder("google-bert/bert-base-uncased")
    output = model(input_ids, attention_mask, labels, decoder_input_ids, special_tokens_mask, decoder_seed=seeds)
    ```
    """

    config_class = RetroMAEConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    # The forward pass takes `num_items_in_batch`: transformers' Trainer need not divide by accumulation steps.
    accepts_loss_kwargs = True

    def __init__(self, config: RetroMAEConfig, encoder: PreTrainedModel | None = None):
        super().__init__(config)
        if encoder is None:
            encoder = AutoModelForMaskedLM.from_config(
                config.encoder_config, dtype=torch.get_default_dtype(), trust_remote_code=False
            )
        _require_embeddings(encoder)
        self.encoder = encoder
        self.decoder = RetroMAEDecoder(config, encoder.base_model.embeddings)
        if config.decoder_query == "embeddings" and self.decoder.embedding_projection is not None:
            raise ValueError(
                f"`decoder_query='embeddings'` passes the sentence embedding through the embedding layer, whose size "
                f"in this {type(encoder).__name__} is another: take `decoder_query='position'`."
            )
        self.post_init()

    @classmethod
    def from_encoder(cls, model: PreTrainedModel | str | os.PathLike, **options) -> "RetroMAEForPreTraining":
        """
        Put a decoder behind an encoder. One without a trained masked-LM head gets a fresh one, and a warning says so.

        Args:
            model: a loaded `…ForMaskedLM`, which is used as it is and not copied, or a path or Hub id of an encoder.
            options: fields of [`RetroMAEConfig`]; with a path or id, `dtype`, `revision` and `token` go to
                `from_pretrained`.

        Raises:
            ValueError: for an encoder that is not transformers' own, or without a masked-LM head or an embedding layer
                of the usual kind, a checkpoint that lacks weights below the head, or an option that is no field of
                the config.
        """
        loading = {key: options.pop(key) for key in _LOADING & options.keys()}
        unknown = sorted(set(options) - set(inspect.signature(RetroMAEConfig.__init__).parameters))
        if unknown:
            # A config keeps whatever it is given, so a mistyped option would be ignored in silence.
            raise ValueError(f"RetroMAEConfig has no field {', '.join(map(repr, unknown))}.")
        if isinstance(model, PreTrainedModel):
            encoder, name = model, getattr(model, "name_or_path", None) or None
        else:
            encoder, name = _load_encoder(model, loading), os.fspath(model)
        options.setdefault("encoder_name_or_path", name)
        model = cls(RetroMAEConfig(encoder_config=encoder.config, **options), encoder=encoder)
        model.decoder.to(encoder.device, encoder.dtype)
        model._check_head()
        return model

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """
        As in transformers, except that a weight which the checkpoint lacks is an error and not drawn at random.

        Raises:
            ValueError: naming the first weight that is missing.
        """
        kwargs.setdefault("use_safetensors", True)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} weights of {cls.__name__}, {missing[0]!r} "
                "first: it is not whole, or no RetroMAE checkpoint (an encoder is loaded with `from_encoder`)."
            )
        return (model, info) if output_loading_info else model

    def forward(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        special_tokens_mask: torch.Tensor | None = None,
        word_ids: torch.LongTensor | None = None,
        decoder_seed: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> RetroMAEOutput:
        """
        Losses are left out where their inputs are: without `labels` the encoder's, without `decoder_input_ids` the
        decoder's (what remains is plain masked-LM training).

        Args:
            input_ids: (B, L), the text as the encoder sees it, masked; padding on the right.
            attention_mask: (B, L), 1 at real tokens.
            labels: (B, L), the token where the encoder is to predict it, -100 elsewhere.
            decoder_input_ids: (B, L), the text itself.
            special_tokens_mask: (B, L), 1 at special tokens, which are neither hidden nor predicted. Left out, these
                are the first and the last real token of each row.
            word_ids: (B, L), equal for neighbouring tokens of one word, which are hidden together; left out, each
                token is a word.
            decoder_seed: (B,) int64. What is hidden from the decoder depends on it, the example and nothing else;
                left out, seeds are drawn from torch's CPU generator.
            decoder_attention_mask: (B, L, L), 1 where row i sees position j (enhanced decoding); sampled here by
                Eq. 7 where it is left out. Padding is never seen.
            decoder_labels: (B, L), as `labels`, for the decoder. Enhanced decoding predicts by default every real
                token that is not special; basic decoding what it hides. Given with basic decoding,
                `decoder_input_ids` must be masked already.
            num_items_in_batch: what the losses are divided by, so that accumulation changes nothing: the sum of
                [`count_items`] over the whole optimisation step, int64 (3,). A single number is the step's count of
                encoder tokens, as transformers' own Trainer has it: each loss is then the mean of this call, times
                the share that this call has in those tokens. Left out, each is the mean of this call.

        Raises:
            ValueError: for padding on the left, or `decoder_input_ids` of another shape than `input_ids`.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if not bool(attention_mask[:, 0].all()):
            row = int(attention_mask[:, 0].ne(0).int().argmin())
            raise ValueError(
                f"Row {row} of `attention_mask` does not start with a real token: pad on the right, and leave empty "
                "texts out."
            )
        if decoder_input_ids is not None and decoder_input_ids.shape != input_ids.shape:
            raise ValueError(
                f"`decoder_input_ids` is {tuple(decoder_input_ids.shape)} and `input_ids` {tuple(input_ids.shape)}: "
                "the decoder rebuilds the same tokens, so the shapes must be equal."
            )
        hidden = self._encode(input_ids, attention_mask)
        embedding = _pool(hidden, attention_mask, self.config.pooling)
        output = RetroMAEOutput(sentence_embedding=embedding)
        losses = []
        if labels is not None:
            scored = labels != -100
            total, hits = self._score(hidden[scored], labels[scored])
            output["num_encoder_tokens"] = scored.sum()
            loss = total / _divisor(num_items_in_batch, 0, output.num_encoder_tokens, output.num_encoder_tokens)
            # Copies: Trainer scales the loss in place.
            output["encoder_loss"] = loss.detach().clone()
            output["encoder_accuracy"] = hits / output.num_encoder_tokens.clamp(min=1)
            losses.append(loss)
        if decoder_input_ids is not None:
            plan = (special_tokens_mask, word_ids, decoder_seed, decoder_attention_mask, decoder_labels)
            inputs, targets, visible = self._plan_decoding(decoder_input_ids, attention_mask, *plan)
            states = self._decode(embedding, inputs, visible)
            scored = targets != -100
            total, hits = self._score(states[scored], targets[scored])
            output["num_decoder_tokens"] = scored.sum()
            count = output.num_encoder_tokens
            loss = total / _divisor(num_items_in_batch, 1, output.num_decoder_tokens, count)
            output["decoder_loss"] = loss.detach().clone()
            output["decoder_accuracy"] = hits / output.num_decoder_tokens.clamp(min=1)
            losses.append(loss)
            if self.config.bow_loss_weight > 0:
                counted = self._predictable(attention_mask, special_tokens_mask, decoder_labels)
                bag = _bag(decoder_input_ids, counted, self.encoder.config.vocab_size)
                rows = torch.tensor(bag.shape[0], device=bag.device)
                loss = self._bow_loss(hidden, attention_mask, bag) / _divisor(num_items_in_batch, 2, rows, count)
                output["bow_loss"] = loss.detach().clone()
                losses.append(self.config.bow_loss_weight * loss)
        if losses:
            output["loss"] = sum(losses)
        return output

    @torch.no_grad()
    def count_items(
        self,
        attention_mask: torch.Tensor,
        labels: torch.LongTensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        special_tokens_mask: torch.Tensor | None = None,
        word_ids: torch.LongTensor | None = None,
        decoder_seed: torch.LongTensor | None = None,
        decoder_labels: torch.LongTensor | None = None,
        **_ignored,
    ) -> torch.Tensor:
        """
        What a batch adds to `num_items_in_batch`; takes the batch as `forward` does.

        Returns:
            int64 (3,): tokens that the encoder predicts, tokens that the decoder predicts, texts.

        Raises:
            ValueError: for basic decoding without `decoder_seed`: `forward` would hide other tokens.
        """
        device = attention_mask.device
        encoder = torch.zeros((), dtype=torch.long, device=device) if labels is None else labels.ne(-100).sum()
        decoder = torch.zeros_like(encoder)
        if decoder_input_ids is not None and decoder_labels is not None:
            decoder = decoder_labels.ne(-100).sum()
        elif decoder_input_ids is not None and self.config.decoding == "enhanced":
            decoder = self._predictable(attention_mask, special_tokens_mask, None).sum()
        elif decoder_input_ids is not None:
            if decoder_seed is None:
                raise ValueError("Basic decoding draws what it hides: pass `decoder_seed`, so that counts agree.")
            plan = (special_tokens_mask, word_ids, decoder_seed, None, None)
            decoder = self._plan_decoding(decoder_input_ids, attention_mask, *plan)[1].ne(-100).sum()
        return torch.stack((encoder, decoder, torch.full_like(encoder, attention_mask.shape[0])))

    def embed(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(B, L) token ids, unmasked, and mask -> (B, d) sentence embeddings, not normalised."""
        return _pool(self._encode(input_ids, attention_mask), attention_mask, self.config.pooling)

    def _encode(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # Not the whole `…ForMaskedLM`: it would make the logits of all tokens.
        return self.encoder.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    # Decoding

    def _plan_decoding(
        self, input_ids, attention_mask, special_tokens_mask, word_ids, seeds, visible, labels
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> what the decoder reads (B, L), what it predicts (B, L), what it sees (B, L or 1, L) bool."""
        special = _special(attention_mask, special_tokens_mask)
        if seeds is None:
            seeds = torch.randint(2**63 - 1, (input_ids.shape[0],))
        sample = (attention_mask, self.config.decoder_mask_ratio, seeds, special, word_ids)
        real = attention_mask.bool()
        if self.config.decoding == "basic":
            if labels is None:
                hidden = sample_hidden(*sample)
                labels = input_ids.masked_fill(~hidden, -100)
                input_ids = input_ids.masked_fill(hidden, self.config.mask_token_id)
            return input_ids, labels, real[:, None]
        visible = sample_visibility(*sample) if visible is None else visible.bool() & real[:, None]
        if labels is None:
            labels = input_ids.masked_fill(~self._predictable(attention_mask, special_tokens_mask, None), -100)
        return input_ids, labels, visible

    def _decode(self, embedding: torch.Tensor, input_ids: torch.LongTensor, visible: torch.Tensor) -> torch.Tensor:
        """(B, d) embedding, (B, L) token ids, visibility -> (B, L, d) states that the head predicts from."""
        embeddings, decoder = self.encoder.base_model.embeddings, self.decoder
        sentence = embedding[:, None, :]
        words = embeddings(input_ids=input_ids)
        if decoder.embedding_projection is not None:
            words = decoder.embedding_projection(words)
        own_positions = 0
        if decoder.position_embeddings is not None and not decoder.positions_in_embeddings:
            own_positions = decoder.position_embeddings.weight[: input_ids.shape[1]]
        # H2 of Eq. 4, and H of Eq. 2: the sentence embedding stands in for the first token, without a position.
        context = torch.cat((sentence.to(words.dtype), (words + own_positions)[:, 1:]), dim=1)
        if self.config.decoding == "basic":
            for layer in decoder.layers:
                context = layer(context, context, visible)
            return context
        if self.config.decoder_query == "embeddings":
            query = embeddings(input_ids=None, inputs_embeds=sentence.expand(-1, input_ids.shape[1], -1))
            query = query + own_positions
        else:
            query = sentence + self._positions(input_ids.shape[1])
        return decoder.layers[0](query, context, visible)

    def _positions(self, length: int) -> torch.Tensor:
        """p_0 … p_N of Eq. 4, (L, d): the encoder's table, or the decoder's own where that has none that fits."""
        table, offset = self.decoder.position_embeddings, 0
        if table is None:
            table = self.encoder.base_model.embeddings.position_embeddings
            # RoBERTa and its kin count from behind the padding's row.
            offset = 0 if table.padding_idx is None else table.padding_idx + 1
        if offset + length > table.num_embeddings:
            raise ValueError(
                f"A row of {length} tokens is longer than the {table.num_embeddings - offset} positions of "
                f"{type(self.encoder).__name__}: truncate the texts."
            )
        return table(torch.arange(offset, offset + length, device=table.weight.device))

    @staticmethod
    def _predictable(attention_mask, special_tokens_mask, labels) -> torch.Tensor:
        """(B, L) bool: the tokens of the text itself."""
        if labels is not None and special_tokens_mask is None:
            return labels != -100
        return attention_mask.bool() & ~_special(attention_mask, special_tokens_mask)

    # Scores: a part of the tokens at a time, whose logits are made again for the gradient instead of being kept

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, d) states, (N,) targets -> summed cross-entropy, and how many targets were the likeliest token."""
        step = max(1, _CHUNK_ELEMENTS // self.encoder.config.vocab_size)
        # Without a target one empty part is left, so that every process has a gradient for every weight.
        parts = zip(hidden.split(step), targets.split(step), strict=True)
        results = [_recomputed(self._score_part, *part) for part in parts]
        return sum(total for total, _ in results), sum(hits for _, hits in results)

    def _score_part(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logits(hidden)
        total = nn.functional.cross_entropy(logits, targets, reduction="sum")
        return total, (logits.detach().argmax(-1) == targets).sum()

    def _bow_loss(self, hidden: torch.Tensor, attention_mask: torch.Tensor, bag: torch.Tensor) -> torch.Tensor:
        """Summed over texts: cross-entropy of the bag and each word's largest logit at any token but the first."""
        step = max(1, _CHUNK_ELEMENTS // (self.encoder.config.vocab_size * hidden.shape[1]))
        parts = zip(hidden.split(step), attention_mask.bool().split(step), bag.split(step), strict=True)
        return sum(_recomputed(self._bow_part, *part) for part in parts)

    def _bow_part(self, hidden: torch.Tensor, real: torch.Tensor, bag: torch.Tensor) -> torch.Tensor:
        rows, length, size = hidden.shape
        logits = self._logits(hidden[:, 1:].reshape(-1, size)).view(rows, length - 1, -1)
        # Far below any logit, yet finite: a text of one token has no other.
        # Of equal logits `max` picks one, as theirs; `amax` would share the gradient (padding's weights are all zero).
        logits = logits.masked_fill(~real[:, 1:, None], -1e4).max(1).values
        return -(bag * logits.log_softmax(-1)).sum()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N, d) states -> (N, V) logits of the encoder's own head, float32 (float64 for float64 states)."""
        # Architectures keep their head in differing places. What all share is that `forward` runs the body and then
        # the head, so a view of the encoder whose body hands the states through is the head.
        head = copy.copy(self.encoder)
        head._modules = {**self.encoder._modules, self.encoder.base_model_prefix: _HandThrough()}
        logits = type(head).forward(head, inputs_embeds=hidden[None], return_dict=True).logits[0]
        return logits if logits.dtype == torch.float64 else logits.float()

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare our logits with the encoder's own on two tokens."""
        weight = self.get_input_embeddings().weight
        if weight.is_meta or hasattr(weight, "ds_id"):
            return  # Nothing to compute with: on no device, or partitioned by ZeRO-3.
        training = self.encoder.training
        self.encoder.eval()
        tokens = torch.tensor([[2, 3]], device=weight.device)
        found = self._logits(self._encode(tokens, torch.ones_like(tokens))[0])
        expected = self.encoder(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0].to(found.dtype)
        self.encoder.train(training)
        if found.shape != expected.shape or (found - expected).norm() > 1e-2 * expected.norm():
            raise ValueError(
                f"{type(self.encoder).__name__} makes its logits by more than a head on its body's states: choose "
                "another encoder, such as BERT, RoBERTa or ModernBERT."
            )

    def get_input_embeddings(self):
        return self.encoder.get_input_embeddings()

    def get_output_embeddings(self):
        # Resizing and tying are the encoder's own business.
        return None


class _HandThrough(nn.Module):
    """In the place of an encoder's body: returns the states that it is given."""

    def forward(self, *args, inputs_embeds: torch.Tensor, **kwargs) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=inputs_embeds)


def _recomputed(function, *tensors):
    """`function(*tensors)` whose intermediate results are computed again in the backward pass."""
    if not torch.is_grad_enabled():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def _divisor(num_items, index: int, own: torch.Tensor, own_encoder: torch.Tensor | None) -> torch.Tensor:
    """What a summed loss over `own` items is divided by; `index` is its place in `num_items_in_batch`."""
    own = own.clamp(min=1)
    if num_items is None:
        return own
    num_items = torch.as_tensor(num_items, device=own.device)
    if num_items.numel() == 3:
        return num_items.flatten()[index].clamp(min=1)
    if num_items.numel() != 1:
        raise ValueError(
            f"`num_items_in_batch` has {num_items.numel()} numbers: give the sum of `count_items` over the step (3), "
            "or the step's count of encoder tokens (1)."
        )
    if own_encoder is None:
        raise ValueError("`num_items_in_batch` counts encoder tokens, and there are no `labels`: give three numbers.")
    return own * num_items / own_encoder.clamp(min=1)


def _pool(hidden: torch.Tensor, attention_mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """(B, L, d) states and (B, L) mask -> (B, d)."""
    if pooling == "cls":
        return hidden[:, 0]
    mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


def _special(attention_mask: torch.Tensor, special_tokens_mask: torch.Tensor | None) -> torch.Tensor:
    """(B, L) bool; without a mask the first and the last real token."""
    if special_tokens_mask is not None:
        return special_tokens_mask.bool()
    place = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return (place == 0) | (place == attention_mask.sum(-1, keepdim=True) - 1)


def _bag(input_ids: torch.LongTensor, counted: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """(B, L) token ids, (B, L) bool -> (B, V): a text's tokens, each once, at equal weight; rows sum to 1."""
    bag = torch.zeros(input_ids.shape[0], vocabulary, device=input_ids.device)
    # `amax`, not an assignment: a token that is counted in one place may not be in another.
    bag.scatter_reduce_(1, input_ids, counted.to(bag.dtype), "amax")
    return bag / bag.sum(-1, keepdim=True).clamp(min=1)


def _require_embeddings(encoder: PreTrainedModel) -> None:
    name = type(encoder).__name__
    if encoder.get_output_embeddings() is None or encoder.base_model is encoder:
        raise ValueError(
            f"{name} has no masked-LM head: load the encoder with `AutoModelForMaskedLM`, or pass its path."
        )
    embeddings = getattr(encoder.base_model, "embeddings", None)
    if embeddings is None or encoder.get_input_embeddings() not in list(embeddings.children()):
        raise ValueError(
            f"{name} keeps no embedding layer at `base_model.embeddings`, which the decoder reads words from: choose "
            "another encoder, such as BERT, RoBERTa or ModernBERT."
        )


def _load_encoder(path: str | os.PathLike, loading: dict) -> PreTrainedModel:
    # Trained weights are float32 unless asked: a checkpoint's own dtype would make it pure bf16 in silence.
    loading.setdefault("dtype", torch.float32)
    hub = {key: value for key, value in loading.items() if key != "dtype"}
    config = PreTrainedConfig.get_config_dict(path, **hub)[0]
    require_stock(config)
    kind = config.get("model_type")
    if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] not in MODEL_FOR_MASKED_LM_MAPPING:
        raise ValueError(
            f"{path} is of the architecture {kind!r}, for which transformers has no masked LM (a decoder, for one): "
            "RetroMAE pre-trains encoders, such as BERT, RoBERTa or ModernBERT. A decoder is trained with Revela."
        )
    loading |= {"trust_remote_code": False, "use_safetensors": True}
    encoder, info = AutoModelForMaskedLM.from_pretrained(path, output_loading_info=True, **loading)
    prefix = f"{encoder.base_model_prefix}."
    below = sorted(name for name in info["missing_keys"] if name.startswith(prefix))
    if below:
        raise ValueError(
            f"{path} lacks {len(below)} weights of {type(encoder).__name__} below its head, {below[0]!r} first: it is "
            "not whole, or a checkpoint of another architecture."
        )
    if info["missing_keys"]:
        warnings.warn(
            f"{path} carries no trained masked-LM head ({sorted(info['missing_keys'])[0]!r} and others are missing): "
            "the head starts fresh, and the first steps will mostly train it.",
            stacklevel=3,
        )
    return encoder


RetroMAEForPreTraining.register_for_auto_class("AutoModelForPreTraining")

__all__ = ["RetroMAEForPreTraining", "RetroMAEOutput"]
