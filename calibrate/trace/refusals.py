"""Runs that the traced or measured code cannot be: what would be left out in silence is refused by name."""

from __future__ import annotations

import re

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.fused import LINEAR_KERNELS
from tunecast.model.loss_chunks import CHUNKED_NLL, KEPT_CHUNKS
from tunecast.model.run import Run
from tunecast.model.stacks import code_of

NEEDED = ("torch", "transformers", "peft", "bitsandbytes")
"""Packages whose real code a trace runs; the extra ``calibrate`` has them."""
REAL_LOSSES = ("nll", CHUNKED_NLL, *KEPT_CHUNKS)
"""Loss paths whose code runs here."""


PRINTED_MODULE = re.compile(r"\(\n.*\n\)", re.DOTALL)
"""What PyTorch prints of a module within its class."""
OWN_FLASH = ("falcon", "gptj")
"""Families whose own FlashAttention code is only there with the flash-attn package."""
IMAGES_ALONE = ("mllama", "mllama_text_model")
"""Families some of whose layers attend to images, and are passed over without."""
LAYERS_OF_SEVERAL = ("falcon", "gptj", "bloom")
"""Families whose layers return a tuple, which Unsloth's offloaded checkpoint cannot take back."""


def reason_of(error: Exception) -> str:
    """The first words of an error of other people's code, modules printed over several lines by their class alone; its
    kind where it has none."""
    text = PRINTED_MODULE.sub("", str(error))
    return next(filter(None, map(str.strip, text.splitlines())), type(error).__name__)


def refuse_family(model_type: str, run: Run) -> None:
    """Refuse what the real code of a family does not run here."""
    if model_type in IMAGES_ALONE:
        raise NotSupportedError(
            f"Some layers of {model_type} attend to images and are passed over where there are none, so a trace of "
            "text alone says too little of its training; that is not built."
        )
    if model_type in OWN_FLASH and run.flash:
        raise NotSupportedError(
            f"The real code of {model_type} runs {run.attn_implementation} with the flash-attn package only; use "
            "--attn-implementation eager, or leave --exact out."
        )
    if model_type in LAYERS_OF_SEVERAL and run.activation_offloading and run.reentrant:
        raise NotSupportedError(
            f"Layers of {model_type} return tuples, on which Unsloth's offloaded checkpoint fails; add --no-reentrant, "
            "or leave --activation-offloading out."
        )


def refuse_unreal(run: Run, *, device: str) -> None:
    """Refuse what has operations in the formulas only: fused and compiled kernels, GPTQ and 8-bit
    products, older code."""
    base = run.base_quantization or ""
    reasons = {
        f"{code_of(run.stack)} code (--stack {run.stack})": bool(code_of(run.stack)),
        "fused kernels": not {*run.fused_kernels} <= {*LINEAR_KERNELS},
        f"the loss path {run.loss_type}": run.loss_type not in REAL_LOSSES,
        "a GPTQ base": base.startswith("gptq"),
        "an 8-bit base on a device": base == "bnb-8bit" and device != "meta",
        "8-bit products": run.fp8 is not None,
        "torch.compile (--torch-compile)": run.torch_compile,
        "an update in the backward (--optimizer-in-backward)": run.optimizer_in_backward,
        "what a checkpoint keeps (--checkpoint-keeps-ops)": run.checkpoint_keeps_ops,
        "attention recomputed alone (--recompute-attention)": run.recompute_attention,
        f"the code of transformers {run.hf_code}": run.hf_code != "5",
    }
    for what, asked in reasons.items():
        if asked:
            raise NotSupportedError(
                f"The real code of this run was asked for, but {what} has formulas only; use tunecast estimate without "
                "--exact, or leave it out."
            )
