"""The authors' own numbers, through the public classes (tests/golden/README.md)."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import BertConfig, BertForMaskedLM

from modeling_retromae import RetroMAEForPreTraining
from tests.modeling_revela.tiny import relative_error

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-5
# Their names of the decoder's weights, and ours.
DECODER = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "attention_output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "intermediate",
    "output.dense": "output",
    "output.LayerNorm": "output_norm",
}
OPTIONS = {
    "retromae_bert": {},
    "dupmae_bert": {"decoder_query": "embeddings", "bow_loss_weight": 0.1},
}


def our_name(theirs: str) -> str:
    if theirs.startswith("lm."):
        return theirs.replace("lm.", "encoder.", 1)
    module, _, kind = theirs.removeprefix("c_head.").rpartition(".")
    return f"decoder.layers.0.{DECODER[module]}.{kind}"


@pytest.fixture(scope="module", params=OPTIONS)
def case(request):
    """Their tensors, our model with their weights, our output after backward."""
    with safe_open(GOLDEN / f"{request.param}.safetensors", "pt") as stored:
        config = BertConfig(**json.loads(stored.metadata()["config"]))
        golden = {key: stored.get_tensor(key) for key in stored.keys()}
    weights = {key.removeprefix("param."): value for key, value in golden.items() if key.startswith("param.")}
    model = RetroMAEForPreTraining.from_encoder(BertForMaskedLM(config).double(), **OPTIONS[request.param])
    result = model.load_state_dict({our_name(name): value for name, value in weights.items()}, strict=False)
    assert not result.unexpected_keys
    # What they do not list is tied to what they do.
    assert set(result.missing_keys) == {f"encoder.cls.predictions.decoder.{kind}" for kind in ("weight", "bias")}
    output = model.train()(
        input_ids=golden["encoder_input_ids"],
        attention_mask=golden["encoder_attention_mask"],
        labels=golden["encoder_labels"],
        decoder_input_ids=golden["decoder_input_ids"],
        decoder_labels=golden["decoder_labels"],
        decoder_attention_mask=golden["decoder_attention_mask"],
    )
    output.loss.backward()
    return golden, model, output


def test_losses(case):
    golden, _, output = case
    assert output.encoder_loss.item() == pytest.approx(golden["encoder_loss"].item(), abs=TOLERANCE)
    assert output.loss.item() == pytest.approx(golden["loss"].item(), abs=TOLERANCE)


def test_gradients_of_every_weight(case):
    golden, model, _ = case
    stored = {key.removeprefix("grad.param.") for key in golden if key.startswith("grad.param.")}
    named = dict(model.named_parameters())
    assert {our_name(name) for name in stored} == set(named)
    for name in stored:
        reference = golden[f"grad.param.{name}"]
        if name.endswith("key.bias"):  # Added to every key, it has no gradient but rounding.
            assert reference.norm() < 1e-12 and named[our_name(name)].grad.norm() < 1e-12, name
        else:
            assert relative_error(named[our_name(name)].grad, reference) < TOLERANCE, name


def test_the_loss_is_the_weighted_sum(case):
    golden, model, output = case
    weight = model.config.bow_loss_weight
    assert (output.bow_loss is None) == ("bag_word_weight" not in golden) == (weight == 0)
    bag = 0.0 if output.bow_loss is None else weight * output.bow_loss.item()
    assert output.encoder_loss.item() + output.decoder_loss.item() + bag == pytest.approx(output.loss.item())
