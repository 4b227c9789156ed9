"""Memory that PyTorch keeps for matrix products: one workspace for each thread that multiplies.

A thread's first product takes its workspace from the caching allocator and keeps it, so it is among the allocated
bytes from then on. A step multiplies in two threads, the program's and autograd's. Published A100 runs hold these
16.25 MiB beyond their tensors (tests/calibrate/test_published_workspaces.py).

Source: PyTorch ``aten/src/ATen/cuda/CublasHandlePool.cpp`` (``parseChosenWorkspaceSize``, whose sizes
``CUBLAS_WORKSPACE_CONFIG`` changes; ``getCurrentCUDABlasHandle``, a handle for each thread). Those of Blackwell are
today's; earlier versions kept Ampere's for it.
"""

from __future__ import annotations

from tunecast.model.units import MIB

THREADS = 2
"""The program's, which runs the forward and the update, and autograd's, which runs the backward."""
USUAL_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
WIDE_BYTES = 32 * MIB
WIDE_MAJORS = ("9", "10", "12")
"""Hopper and Blackwell."""
AMD = "gfx"
AMD_WIDEST = ("gfx94", "gfx95")
AMD_WIDEST_BYTES = 128 * MIB


def workspace_bytes(compute_capability: str | None) -> int:
    """Bytes of all workspaces of a training process on a card; 0 where there is no card (a CPU)."""
    if not compute_capability:
        return 0
    if compute_capability.startswith(AMD):
        return THREADS * (AMD_WIDEST_BYTES if compute_capability.startswith(AMD_WIDEST) else WIDE_BYTES)
    wide = compute_capability.partition(".")[0] in WIDE_MAJORS
    return THREADS * (WIDE_BYTES if wide else USUAL_BYTES)
