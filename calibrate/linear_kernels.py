"""Kernels of linear attention that transformers takes on this machine: those of packages that are installed here."""

from __future__ import annotations

from importlib.util import find_spec

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.fused import CONVOLUTION, FLA
from tunecast.model.resolve_delta import has_linear_attention
from tunecast.model.run import Run

PACKAGES = {FLA: "fla", CONVOLUTION: "causal_conv1d"}
"""By kernels, the module that transformers looks for (``use_kernel_func_from_hub_with_fallback``)."""


def installed_kernels(architecture: Architecture) -> tuple[str, ...]:
    """Fused kernels that this architecture's code runs here; none without linear attention."""
    if not has_linear_attention(architecture):
        return ()
    return tuple(kernels for kernels, module in PACKAGES.items() if find_spec(module) is not None)


def asked_kernels(run: Run) -> tuple[str, ...]:
    """Those that the run says it has."""
    return tuple(kernels for kernels in PACKAGES if run.fuses(kernels))


def check_installed_kernels(architecture: Architecture, run: Run) -> None:
    """Raise InputError for a run that this machine's packages would train otherwise."""
    asked, found = (",".join(each) or "none" for each in (asked_kernels(run), installed_kernels(architecture)))
    if asked != found:
        raise InputError(
            f"--fused-kernels {asked} was asked for, but transformers takes {found} here, by what is installed; "
            f"type --fused-kernels {found}, or change what is installed."
        )


def refuse_traced_kernels(architecture: Architecture, run: Run) -> None:
    """Raise NotSupportedError for a trace on fake tensors of kernels that need a GPU."""
    if asked_kernels(run):
        raise NotSupportedError(
            f"The real code of this run cannot be traced here: its kernels of {' and '.join(asked_kernels(run))} need "
            "a GPU; use tunecast estimate without --exact, or leave --fused-kernels out."
        )
    found = installed_kernels(architecture)
    if found:
        raise NotSupportedError(
            f"The real code of {architecture.name} runs the kernels of {' and '.join(found)} where they are installed, "
            f"which need a GPU; leave --exact out and type --fused-kernels {','.join(found)}."
        )
