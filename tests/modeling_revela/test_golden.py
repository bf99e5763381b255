"""The authors' own numbers, through the public classes (tests/golden/README.md)."""

import json
from itertools import product
from pathlib import Path

import pytest
import transformers
from safetensors import safe_open

from modeling_revela import RevelaForPreTraining
from tests.modeling_revela.tiny import KERNELS, relative_error, use_kernel

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-5


CASES = ("revela_llama_plain", "revela_llama_vnorm", "revela_llama_mha_sharp")


@pytest.fixture(scope="module", params=product(CASES, KERNELS), ids="-".join)
def case(request):
    """Their tensors, our model with their weights, the weights of in-batch attention, our output after backward."""
    name, kernel = request.param
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as stored:
        metadata = stored.metadata()
        golden = {key: stored.get_tensor(key) for key in stored.keys()}
    arguments = json.loads(metadata["config"])
    architecture = getattr(transformers, arguments.pop("architecture"))
    arguments["rope_parameters"] = {"rope_type": "default", "rope_theta": arguments.pop("rope_theta")}
    lm = architecture(architecture.config_class(**arguments)).double()
    lm.load_state_dict(
        {key.removeprefix("param."): value for key, value in golden.items() if key.startswith("param.")}
    )
    model = RevelaForPreTraining.from_backbones(
        transformers.AutoModel.from_config(lm.config),
        lm,
        v_norm=metadata["v_norm"] == "True",
        v_norm_eps=float(metadata["v_norm_eps"]),
        similarity_temperature=float(metadata["temperature"]),
    )
    queries = golden["query_embeddings"].requires_grad_()
    passages = golden["passage_embeddings"].requires_grad_()
    weights, _ = model.similarity_weights(queries, passages)
    with use_kernel(kernel):
        output = model(
            golden["input_ids"],
            golden["attention_mask"],
            labels=golden["input_ids"].masked_fill(golden["attention_mask"] == 0, -100),
            in_batch_weights=weights,
        )
    output.loss.backward()
    return golden, lm, weights, output


def test_in_batch_weights(case):
    golden, _, weights, _ = case
    assert (weights - golden["in_batch_weights"]).abs().max() < TOLERANCE


def test_losses(case):
    golden, _, _, output = case
    assert output.loss.item() == pytest.approx(golden["loss_in_batch"].item(), abs=TOLERANCE)
    assert output.next_token_loss.item() == pytest.approx(golden["loss_next_token"].item(), abs=TOLERANCE)


def test_gradients_of_every_weight(case):
    golden, lm, _, _ = case
    stored = {key.removeprefix("grad.param.") for key in golden if key.startswith("grad.param.")}
    named = dict(lm.named_parameters())
    assert stored == set(named)
    for name, parameter in named.items():
        assert relative_error(parameter.grad, golden[f"grad.param.{name}"]) < TOLERANCE, name


@pytest.mark.parametrize("side", ["query", "passage"])
def test_gradients_of_the_embeddings(case, side):
    golden = case[0]
    assert relative_error(golden[f"{side}_embeddings"].grad, golden[f"grad.{side}_embeddings"]) < TOLERANCE
