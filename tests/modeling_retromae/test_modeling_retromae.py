"""RetroMAE around each family of encoders, through the public classes."""

import json
import math
import os
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import BertForMaskedLM, BertModel

from modeling_retromae import RetroMAEConfig, RetroMAEForPreTraining
from modeling_retromae.decoder_visibility import sample_visibility
from tests.modeling_retromae.encoders import ENCODERS, VOCABULARY, make_encoder
from tests.modeling_revela.tiny import relative_error

CLS, PAD, SEP, MASK = 0, 1, 2, 3
DECODERS = {
    "enhanced": {},
    "basic": {"decoding": "basic"},
    "basic-3": {"decoding": "basic", "decoder_layers": 3},
    "dupmae": {"decoder_query": "embeddings", "bow_loss_weight": 0.1},
}


def make_batch(lengths=(12, 7, 9), seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of random tokens between CLS and SEP, every third hidden from the encoder."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)
    text = torch.randint(4, VOCABULARY, shape, generator=generator)
    place = torch.arange(shape[1])[None]
    length = torch.tensor(lengths)[:, None]
    text = text.masked_fill(place == 0, CLS).masked_fill(place == length - 1, SEP).masked_fill(place >= length, PAD)
    special = (place == 0) | (place >= length - 1)
    hidden = (place % 3 == 1) & ~special
    return {
        "input_ids": text.masked_fill(hidden, MASK),
        "attention_mask": (place < length).long(),
        "labels": text.masked_fill(~hidden, -100),
        "decoder_input_ids": text,
        "special_tokens_mask": special.long(),
        "decoder_seed": torch.arange(len(lengths)) + 5,
    }


def make_model(encoder: str = "bert", **options) -> RetroMAEForPreTraining:
    torch.manual_seed(7)
    model = RetroMAEForPreTraining.from_encoder(make_encoder(encoder), mask_token_id=MASK, **options)
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


# Eq. 4-7 by hand: one token at a time, a softmax over just what it sees


def own_head(model: RetroMAEForPreTraining, states: torch.Tensor) -> torch.Tensor:
    """The stock model's logits with `states` as what its body made."""
    body = model.encoder.base_model
    handle = body.register_forward_hook(lambda module, args, output: type(output)(last_hidden_state=states))
    logits = model.encoder(input_ids=torch.full(states.shape[:2], 4)).logits
    handle.remove()
    return logits


def position_rows(model: RetroMAEForPreTraining, length: int) -> torch.Tensor:
    table = model.decoder.position_embeddings
    if table is not None:
        return table.weight[:length]
    table = model.encoder.base_model.embeddings.position_embeddings
    start = 0 if table.padding_idx is None else table.padding_idx + 1
    return table.weight[start : start + length]


def decode_by_hand(model, sentence: torch.Tensor, words: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """(d,) sentence embedding, (L, d) embedded words, (L, L) bool -> (L, d)."""
    layer = model.decoder.layers[0]
    context = torch.cat((sentence[None], words[1:]))
    positions = position_rows(model, len(words))
    rows = []
    for i in range(len(words)):
        asked = sentence + positions[i]
        seen = [j for j in range(len(words)) if visible[i, j]]
        attended = []
        for head in range(layer.num_heads):
            size = len(sentence) // layer.num_heads
            part = slice(head * size, (head + 1) * size)
            query = layer.query(asked)[part]
            scores = torch.stack([layer.key(context[j])[part] @ query / math.sqrt(size) for j in seen])
            values = torch.stack([layer.value(context[j])[part] for j in seen])
            attended.append(torch.softmax(scores, 0) @ values)
        hidden = layer.attention_norm(asked + layer.attention_output(torch.cat(attended)))
        rows.append(layer.output_norm(hidden + layer.output(layer.activation(layer.intermediate(hidden)))))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ENCODERS)
def test_losses_and_gradients_are_those_of_the_equations(name):
    model, batch = make_model(name).double(), make_batch()
    output = model(**batch)
    output.loss.backward()
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()

    mask, text, special = batch["attention_mask"], batch["decoder_input_ids"], batch["special_tokens_mask"].bool()
    logits = model.encoder(input_ids=batch["input_ids"], attention_mask=mask).logits
    encoder_loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    hidden = model.encoder.base_model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
    embeddings = model.encoder.base_model.embeddings(input_ids=text)
    if model.decoder.embedding_projection is not None:
        embeddings = model.decoder.embedding_projection(embeddings)
    if not model.decoder.positions_in_embeddings:
        embeddings = embeddings + position_rows(model, text.shape[1])
    visible = sample_visibility(mask, 0.5, batch["decoder_seed"], special)
    states = torch.stack([decode_by_hand(model, hidden[row, 0], embeddings[row], visible[row]) for row in range(3)])
    targets = text.masked_fill(special, -100)
    decoder_loss = nn.functional.cross_entropy(own_head(model, states).flatten(0, 1), targets.flatten())
    (encoder_loss + decoder_loss).backward()

    assert output.encoder_loss.item() == pytest.approx(encoder_loss.item(), rel=1e-9)
    assert output.decoder_loss.item() == pytest.approx(decoder_loss.item(), rel=1e-9)
    assert torch.equal(output.sentence_embedding, hidden[:, 0])
    for parameter, value in model.named_parameters():
        if value.grad is None:
            assert parameter not in found or found[parameter].norm() == 0, parameter
        elif value.grad.norm() > 1e-9:
            assert relative_error(found[parameter], value.grad) < 1e-6, parameter


def test_basic_decoding_predicts_what_it_hides_from_the_rest():
    model, batch = make_model(decoding="basic", decoder_layers=2).double(), make_batch()
    output = model(**batch)
    inputs, targets, _ = model._plan_decoding(
        batch["decoder_input_ids"],
        batch["attention_mask"],
        batch["special_tokens_mask"],
        None,
        batch["decoder_seed"],
        None,
        None,
    )
    assert (inputs[targets != -100] == MASK).all() and 0 < (targets != -100).sum() < 22
    assert torch.equal(torch.where(targets == -100, inputs, targets), batch["decoder_input_ids"])
    words = model.encoder.base_model.embeddings(input_ids=inputs)
    states = torch.cat((output.sentence_embedding[:, None], words[:, 1:]), 1)
    for layer in model.decoder.layers:
        # A stock attention module with the same weights (Eq. 2).
        attention = nn.MultiheadAttention(16, 2, batch_first=True).double()
        parts = [getattr(layer, part) for part in ("query", "key", "value")]
        attention.in_proj_weight.data = torch.cat([part.weight for part in parts]).detach()
        attention.in_proj_bias.data = torch.cat([part.bias for part in parts]).detach()
        attention.out_proj.weight.data = layer.attention_output.weight.detach()
        attention.out_proj.bias.data = layer.attention_output.bias.detach()
        attended, _ = attention(states, states, states, key_padding_mask=batch["attention_mask"] == 0)
        states = layer.attention_norm(states + attended)
        states = layer.output_norm(states + layer.output(layer.activation(layer.intermediate(states))))
    expected = nn.functional.cross_entropy(own_head(model, states).flatten(0, 1), targets.flatten())
    assert output.decoder_loss.item() == pytest.approx(expected.item(), rel=1e-9)


# What a row sees


@torch.no_grad()
def test_each_row_depends_on_just_the_tokens_that_it_sees():
    model, batch = make_model().double(), make_batch()
    visible = sample_visibility(
        batch["attention_mask"], 0.5, batch["decoder_seed"], batch["special_tokens_mask"].bool()
    )
    text, length = batch["decoder_input_ids"], batch["decoder_input_ids"].shape[1]
    for i in range(length):
        labels = torch.full_like(text, -100)
        labels[:, i] = 9
        row = {**batch, "decoder_labels": labels, "labels": None}
        for b in range(3):
            single = {name: value[b : b + 1] for name, value in row.items() if value is not None}
            expected = model(**single).decoder_loss
            for j in range(1, length):  # in place of token 0 stands the sentence embedding
                changed = single["decoder_input_ids"].clone()
                changed[0, j] = 4 if changed[0, j] != 4 else 5
                differs = model(**{**single, "decoder_input_ids": changed}).decoder_loss != expected
                assert bool(differs) == bool(visible[b, i, j]), (b, i, j)


def test_visibility_has_the_fixed_places_and_the_ratio():
    lengths = torch.tensor([40, 25, 2])
    mask = (torch.arange(40) < lengths[:, None]).long()
    special = torch.zeros(3, 40, dtype=torch.bool)
    special[:, 0] = True
    words = (torch.arange(40) // 2).expand(3, -1)
    kept = torch.zeros(3, 40, 40)
    draws = 400
    for draw in range(draws):
        visible = sample_visibility(mask, 0.7, torch.arange(3) + 3 * draw, special, words)
        assert not visible.diagonal(dim1=1, dim2=2).any() and not visible[:, 0, 0].any() and visible[:, 1:, 0].all()
        assert not (visible[:, :, 1:] & (mask[:, None, 1:] == 0)).any()
        # Both tokens of a word or neither, but for the row's own.
        pairs = visible[0, :, 2:].view(40, 19, 2)
        own = torch.eye(40, dtype=torch.bool)[:, 2:].view(40, 19, 2).any(-1)
        assert ((pairs[..., 0] == pairs[..., 1]) | own).all()
        kept += visible
    share = kept[0, :, 2:] / draws
    free = ~torch.eye(40, dtype=torch.bool)[:, 2:]
    deviation = math.sqrt(0.3 * 0.7 / draws)
    assert abs(share[free].mean() - 0.3) < 4 * deviation / math.sqrt(free.sum() / 2)
    assert (share[free] - 0.3).abs().max() < 5 * deviation
    # By row and by position as well.
    for dim in (0, 1):
        mean = (share * free).sum(dim) / free.sum(dim)
        assert (mean - 0.3).abs().max() < 5 * deviation / math.sqrt(18)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.integers(1, 14), min_size=1, max_size=4), st.floats(0, 1), st.booleans())
def test_visibility_of_any_batch(data, lengths, ratio, has_words):
    length = max(lengths)
    shape = len(lengths), length

    def draw(values):
        row = st.lists(values, min_size=length, max_size=length)
        return torch.tensor(data.draw(st.lists(row, min_size=len(lengths), max_size=len(lengths))))

    real = torch.arange(length) < torch.tensor(lengths)[:, None]
    special, words = draw(st.booleans()), draw(st.integers(0, 1)).cumsum(1) if has_words else None
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=shape[0], max_size=shape[0])))
    visible = sample_visibility(real.long(), ratio, seeds, special, words)
    assert visible.shape == (*shape, length)
    own = torch.eye(length, dtype=torch.bool).expand_as(visible)
    assert not visible[own].any()
    # The embedding's place: seen by all but itself, so every row that predicts a token sees something.
    assert visible[:, 1:, 0].all()
    assert not (visible & ~real[:, None])[:, :, 1:].any()
    assert visible[((special & real)[:, None] & real[:, :, None]).expand_as(visible) & ~own].all()
    names = torch.arange(length).expand(shape) if words is None else words
    for row in range(shape[0]):
        for word in set(names[row].tolist()):
            # Whole words, up to the row's own token and what is always or never seen.
            drawn = (names[row] == word) & real[row] & ~special[row] & (torch.arange(length) > 0)
            for i in range(lengths[row]):
                seen = visible[row, i, drawn & ~own[row, i]]
                assert seen.all() or not seen.any()
        alone = sample_visibility(
            real[row : row + 1, : lengths[row]].long(), ratio, seeds[row : row + 1],
            special[row : row + 1, : lengths[row]], None if words is None else words[row : row + 1, : lengths[row]],
        )  # fmt: skip
        assert torch.equal(alone[0], visible[row, : lengths[row], : lengths[row]])


def test_what_an_example_sees_depends_on_its_seed_alone():
    batch = make_batch()
    alone = make_model()(**{name: value[1:2, :7] if value.ndim > 1 else value[1:2] for name, value in batch.items()})
    batch["labels"][[0, 2]] = -100
    labels = batch["decoder_input_ids"].masked_fill(batch["special_tokens_mask"].bool(), -100)
    labels[[0, 2]] = -100
    together = make_model()(**batch, decoder_labels=labels)
    assert together.decoder_loss.item() == pytest.approx(alone.decoder_loss.item(), abs=1e-6)
    other = make_model()(**{**batch, "decoder_seed": batch["decoder_seed"] + 1}, decoder_labels=labels)
    assert abs(other.decoder_loss.item() - alone.decoder_loss.item()) > 1e-4


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_bf16_with_mixed_lengths_is_finite(encoder, decoder):
    if encoder == "electra-small" and decoder == "dupmae":
        with pytest.raises(ValueError, match="take `decoder_query='position'`"):
            make_model(encoder, **DECODERS[decoder])
        return
    model = make_model(encoder, **DECODERS[decoder]).bfloat16().train()
    output = model(**make_batch((16, 2, 3, 9)))  # a row of CLS and SEP alone among them
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert all(torch.isfinite(value.grad).all() for value in model.parameters() if value.grad is not None)


# Outputs


def test_output_carries_both_losses_accuracies_and_the_embedding():
    output = make_model()(**make_batch())
    assert output.loss.item() == pytest.approx((output.encoder_loss + output.decoder_loss).item())
    assert output.sentence_embedding.shape == (3, 16)
    assert (output.num_encoder_tokens, output.num_decoder_tokens) == (9, 22)
    for name in ("encoder_accuracy", "decoder_accuracy"):
        assert 0 <= output[name] <= 1
    plain = make_model()(**{name: value for name, value in make_batch().items() if not name.startswith("decoder")})
    assert plain.decoder_loss is None and plain.loss == output.encoder_loss


def test_counts_are_those_of_the_forward_pass():
    for options in DECODERS.values():
        model, batch = make_model(**options), make_batch()
        output = model(**batch)
        counted = model.count_items(**batch)
        assert counted.tolist() == [output.num_encoder_tokens, output.num_decoder_tokens, 3]


# Checkpoints


@pytest.mark.parametrize("name", ENCODERS)
def test_saved_and_loaded_it_is_the_same(name, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path)
    again = RetroMAEForPreTraining.from_pretrained(tmp_path).eval()
    assert torch.equal(again(**make_batch()).loss, model(**make_batch()).loss)
    assert again.config.encoder_config.to_dict()["model_type"] == model.encoder.config.model_type


def test_checkpoint_loads_with_remote_code_where_the_package_is_not(tmp_path):
    model = make_model(bow_loss_weight=0.1)
    model.save_pretrained(tmp_path / "run")
    torch.save(make_batch(), tmp_path / "batch.pt")
    code = """
import sys
for name in ("modeling_retromae", "trainers", "hub_cards", "revela_hub"):
    sys.modules[name] = None
import torch
from transformers import AutoModelForPreTraining
model = AutoModelForPreTraining.from_pretrained("run", trust_remote_code=True).eval()
print(repr(model(**torch.load("batch.pt")).loss.item()))
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) == pytest.approx(model(**make_batch()).loss.item(), abs=1e-6)


def test_checkpoint_that_lacks_a_weight_is_an_error(tmp_path):
    from safetensors.torch import load_file, save_file

    make_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["decoder.layers.0.query.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights.*'decoder.layers.0.query.weight'"):
        RetroMAEForPreTraining.from_pretrained(tmp_path)


def test_released_layout_loads_without_a_warning_and_a_headless_encoder_with_one(tmp_path):
    # What the authors release is a BertForMaskedLM, tied head and all.
    released = make_encoder("bert")
    released.save_pretrained(tmp_path / "released")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = RetroMAEForPreTraining.from_encoder(tmp_path / "released")
    assert type(model.encoder) is BertForMaskedLM and model.dtype == torch.float32
    ids = make_batch()["input_ids"]
    assert torch.equal(model.encoder.eval()(ids).logits, released(ids).logits)
    assert model.config.encoder_name_or_path == str(tmp_path / "released")

    BertModel(released.config, add_pooling_layer=False).save_pretrained(tmp_path / "headless")
    with pytest.warns(UserWarning, match="headless carries no trained masked-LM head"):
        RetroMAEForPreTraining.from_encoder(tmp_path / "headless")


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_mask_ratio": 0.0}, "`encoder_mask_ratio` must lie between 0 and 1, both excluded, not 0.0"),
        ({"decoder_mask_ratio": 1.0}, "`decoder_mask_ratio` must lie between 0 and 1"),
        ({"decoder_layers": 2}, "`decoder_layers` must be 1 for enhanced decoding"),
        ({"decoding": "basic", "decoder_layers": 4}, "must be 1 to 3 for basic decoding"),
        ({"decoding": "lesser"}, "`decoding` must be one of enhanced, basic, not 'lesser'"),
        ({"bow_loss_weight": -1.0}, "`bow_loss_weight` must not be negative"),
        ({"pooling": "max"}, "`pooling` must be one of cls, mean"),
        ({"decoding_layers": 2}, "no field 'decoding_layers'"),
    ],
)
def test_options_that_cannot_be_are_errors_that_name_them(options, message):
    with pytest.raises(ValueError, match=message):
        make_model(**options)


def test_a_decoder_is_told_from_an_encoder(tiny_lm_folder):
    with pytest.raises(ValueError, match="architecture 'llama', for which transformers has no masked LM .*encoders"):
        RetroMAEForPreTraining.from_encoder(tiny_lm_folder)


def test_defaults_are_the_papers():
    config = RetroMAEConfig()
    assert (config.encoder_mask_ratio, config.decoder_mask_ratio, config.decoding) == (0.3, 0.5, "enhanced")
    assert json.loads(config.to_json_string())["model_type"] == "retromae"


def test_padding_on_the_left_and_unequal_shapes_are_errors():
    model, batch = make_model(), make_batch()
    mask = batch["attention_mask"].clone()
    mask[1, 0] = 0
    with pytest.raises(ValueError, match="Row 1 of `attention_mask` does not start with a real token"):
        model(**{**batch, "attention_mask": mask})
    with pytest.raises(ValueError, match="the shapes must be equal"):
        model(**{**batch, "decoder_input_ids": batch["decoder_input_ids"][:, :-1]})
