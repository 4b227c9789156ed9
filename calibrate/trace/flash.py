"""``flash_attention_2`` in a trace: transformers' own code around the kernel, without the flash-attn package.

The kernel itself is stood for by PyTorch's flash operator, whose tensors and buffers are the same
(PyTorch's is a copy of it). Padded and packed samples (``flash_attn_varlen_func``) are not traced: a micro-batch with
padding is looked at as the code does, then its rows are taken as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.run import Run
from tunecast.model.stacks import FLASH_2, FLASH_3


def refuse_third(run: Run) -> None:
    """Refuse FlashAttention-3: what stands for the kernel in a trace, and on simulated cards, is version 2."""
    if run.attn_implementation == FLASH_3:
        raise NotSupportedError(
            f"--attn-implementation {FLASH_3} cannot be traced: PyTorch's flash operator, which stands for it in "
            f"traces and on simulated cards, is version 2; use {FLASH_2}, or tunecast estimate without --exact."
        )


@contextlib.contextmanager
def without_the_package() -> Iterator[None]:
    """Models build and run with ``flash_attention_2`` although flash-attn is not installed."""
    from unittest import mock

    import transformers.modeling_flash_attention_utils as utils
    from transformers import PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

    packed = utils._is_packed_sequence
    masks = AttentionMaskInterface._global_mapping
    mask_of = masks[FLASH_2]
    padded = False

    def never_packed(position_ids: Any, batch_size: int) -> bool:
        if not padded:  # else the code takes padding out before it would look
            bool(packed(position_ids, batch_size))
        return False

    def left_in(*args: Any, **kwargs: Any) -> None:
        nonlocal padded
        padded = mask_of(*args, **kwargs) is not None

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(masks, {FLASH_2: left_in}))
        adjust = PreTrainedModel._check_and_adjust_attn_implementation
        stack.enter_context(mock.patch.object(PreTrainedModel, adjust.__name__, _allowing_flash(adjust)))
        stack.enter_context(mock.patch.object(utils, "_lazy_imports", _kernels))
        stack.enter_context(mock.patch.object(utils, "_loaded_implementation", None))
        stack.enter_context(mock.patch.object(utils, "_is_packed_sequence", never_packed))
        yield


def _allowing_flash(adjust: Any) -> Any:
    def allowed(model: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation == "flash_attention_2":
            return attn_implementation
        return adjust(model, attn_implementation, *args, **kwargs)

    return allowed


def _kernels(*_: Any, **__: Any) -> tuple[Any, ...]:
    """Stands for transformers' imports: plain, variable-length, cached, pad and unpad functions."""
    return _flash, _flash, None, None, None


def _flash(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, causal: bool = True, window_size: tuple[int, int] | None = None,
    softcap: float = 0.0, **options: Any,
) -> Any:  # fmt: skip
    """``flash_attn_func`` over (batch, length, heads, head_dim); capped scores stay inside the kernel."""
    del softcap
    import torch

    if window_size is not None:
        raise NotSupportedError(
            "Tracing flash_attention_2 through a sliding window is not built; use --attn-implementation sdpa."
        )
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads_first,
        dropout_p=dropout_p,
        is_causal=causal,
        scale=options.get("softmax_scale"),
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
