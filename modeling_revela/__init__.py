"""Revela (arXiv 2506.16552): a retriever and a causal LM trained together through in-batch attention.

Importing the package registers its classes with transformers' auto classes, so that a checkpoint loads without
`trust_remote_code` where revela-hub is installed; elsewhere the same files travel with the checkpoint.
"""

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForPreTraining

from .configuration_revela import RevelaConfig
from .modeling_revela import RevelaModel
from .modeling_revela_lm import RevelaForCausalLM, RevelaPreTrainedModel
from .modeling_revela_pretraining import RevelaForPreTraining

AutoConfig.register("revela", RevelaConfig, exist_ok=True)
AutoModelForCausalLM.register(RevelaConfig, RevelaForCausalLM, exist_ok=True)
AutoModelForPreTraining.register(RevelaConfig, RevelaForPreTraining, exist_ok=True)

__all__ = ["RevelaConfig", "RevelaForCausalLM", "RevelaForPreTraining", "RevelaModel", "RevelaPreTrainedModel"]
