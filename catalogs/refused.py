"""What people ask for beside the fine-tuning of language models on GPUs: refused by name, with what to type instead."""

from __future__ import annotations

import re

from tunecast.catalogs.errors import NotSupportedError

ACCELERATORS = (
    (r"(cloud|google)?-?(tpu|trillium|ironwood)|v\d+(e|p|litepod)(-\d+)?$", "TPUs"),
    (r"(aws-?)?(trainium|trn\d|inferentia|inf\d)", "AWS Trainium and Inferentia"),
    (r"(intel-?|habana-?)?gaudi", "Gaudi accelerators"),
)
"""Beginning of a name without blanks and case, and what it is."""

IMAGE_MODELS = r"stable[-_ ]?(diffusion|cascade|video)|sd(xl|[123](\.\d)?)([-_ ]|$)|sdxl|flux[-_. ]?[12]|dall-?e|imagen"
"""In the last part of a name: networks that make pictures."""

INFERENCE = ("inference", "generate", "generation", "serve", "serving")
SCRATCH = ("pretrain", "pretraining", "pre-training", "scratch", "from-scratch")
PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo", "ppo", "grpo", "rloo", "rlhf", "reward", "rm")
IMAGE_METHODS = ("dreambooth", "textual-inversion", "textual_inversion")


def refuse_hardware(name: str) -> None:
    """Raises NotSupportedError for an accelerator that is no GPU."""
    plain = name.strip().lower().replace(" ", "-")
    for pattern, kind in ACCELERATORS:
        if re.match(pattern, plain):
            raise NotSupportedError(
                f"{kind} are not built ({name!r} was asked for): only GPUs, CPUs and simulated GPUs are forecast; "
                "`tunecast catalog gpus` lists them."
            )


def refuse_network(name: str) -> None:
    """Raises NotSupportedError for a model that makes pictures."""
    if re.match(IMAGE_MODELS, name.strip().lower().rsplit("/", 1)[-1]):
        raise NotSupportedError(
            f"Stable Diffusion and other image models are not built ({name!r} was asked for): only language models are "
            "forecast; `tunecast catalog models` lists them."
        )


def refuse_method(method: object) -> None:
    """Raises NotSupportedError for what is done with a model but is no fine-tuning."""
    asked = str(method).strip().lower()
    if asked in INFERENCE:
        raise NotSupportedError(
            f"Inference is not built (--method {method}): only training is forecast; use --method lora, qlora or full."
        )
    if asked in SCRATCH:
        raise NotSupportedError(
            f"--method {method} is no method: training from scratch costs what --method full costs; use that."
        )
    if asked in PREFERENCES:
        raise NotSupportedError(
            f"Preference and reinforcement training are not built (--method {method}): only supervised fine-tuning is "
            "forecast; use --method lora, qlora or full."
        )
    if asked in IMAGE_METHODS:
        raise NotSupportedError(
            f"Stable Diffusion and other image models are not built (--method {method}): only language models are "
            "forecast; use --method lora, qlora or full."
        )
