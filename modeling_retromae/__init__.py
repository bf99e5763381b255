"""RetroMAE (arXiv 2205.12035): an encoder pre-trained as a masked auto-encoder whose bottleneck is its embedding.

Importing the package registers its classes with transformers' auto classes, so that a checkpoint loads without
`trust_remote_code` where revela-hub is installed; elsewhere the same files travel with the checkpoint.
"""

from transformers import AutoConfig, AutoModelForPreTraining

from .configuration_retromae import RetroMAEConfig
from .modeling_retromae import RetroMAEForPreTraining, RetroMAEOutput

AutoConfig.register("retromae", RetroMAEConfig, exist_ok=True)
AutoModelForPreTraining.register(RetroMAEConfig, RetroMAEForPreTraining, exist_ok=True)

__all__ = ["RetroMAEConfig", "RetroMAEForPreTraining", "RetroMAEOutput"]
