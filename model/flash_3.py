"""FlashAttention-3: what its kernels allocate and launch where they differ from FlashAttention-2's.

They are written for Hopper (warp-group products, asynchronous copies); transformers calls them by the same code, and
what autograd saves is the same: queries, keys, values, the output and a log-sum-exp per row. Sources: Dao-AILab/
flash-attention ``hopper/flash_api.cpp`` (``mha_fwd``, ``mha_bwd``) and ``hopper/flash_bwd_launch_template.h``.
"""

from __future__ import annotations

from tunecast.catalogs.gpus import Gpu

HEADS = (64, 96, 128, 192, 256)
"""Sizes of heads that have kernels of their own, to the next of which others are rounded (``round_up_headdim``)."""
QUERY_ROWS = {64: 128, 96: 64, 128: 64, 192: 64, 256: 64}
KEY_ROWS = {64: 128, 96: 128, 128: 128, 192: 96, 256: 80}
"""Rows of a tile of the causal backward by the size of heads (``kBlockM_sm90`` and ``kBlockN_sm90``)."""
FORWARD_LAUNCHES = 2
"""The causal kernel, and zeroing the counter that its tiles are handed out by (``tile_count_semaphore``)."""
BACKWARD_LAUNCHES = 3
"""Row sums of dO.O, the main kernel, conversion of dQ."""
GROUPED_BACKWARD_LAUNCHES = 4
"""Zeroing and converting the sums of dK and dV, which the query heads of a group add to."""
CAPABILITY = "9.0"


def runs_flash_3(gpu: Gpu | None) -> bool:
    """Whether the card is one that these kernels are written for: Hopper."""
    return gpu is not None and gpu.vendor == "nvidia" and gpu.compute_capability == CAPABILITY


def scratch_elements(batch: int, heads: int, kv_heads: int, length: int, head_dim: int) -> int:
    """fp32 elements that the backward allocates: dQ, row sums and log-sum-exps of whole tiles, and where query heads
    share keys the sums of dK and dV, once for every key head."""
    size = next(wide for wide in HEADS if head_dim <= wide)
    queries, keys = (-(-length // rows[size]) * rows[size] for rows in (QUERY_ROWS, KEY_ROWS))
    shared = 2 * kv_heads * keys * size if heads != kv_heads else 0
    return batch * (heads * queries * (size + 2) + shared)
