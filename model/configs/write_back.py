"""What a written training file runs otherwise than the plan, by our own reader of such files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from tunecast.catalogs.errors import InputError, TunecastError
from tunecast.model.architecture import Architecture
from tunecast.model.configs.merge import merge_options
from tunecast.model.configs.read import read_mapping
from tunecast.model.fused import LINEAR_KERNELS
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE
from tunecast.model.resolve import resolve_run
from tunecast.model.rows import with_padding
from tunecast.model.run import BY_CARD, BY_DATA, Run

LAYOUT = (
    "gpus_per_node",
    "num_gpus",
    "attention_length",
    "padding_mask",
    "sdpa_cudnn",
    "token_metrics",
    "trainer_loop",
    *BY_CARD,
    *BY_DATA,
)
"""Fields that the launcher, the machine, the data or the program itself decide."""


def read_back(kind: str, mapping: Mapping[str, Any], architecture: Architecture, num_gpus: int) -> Run:
    """The run that our own reader makes of the file; the launcher's number of GPUs is given."""
    run_file = read_mapping(mapping, name=f"the {kind} file", config_format=kind, num_gpus=num_gpus)
    options = merge_options(run_file, {"num_gpus": num_gpus, "allow_long_context": True}).options
    own = {name: value for name, value in options.items() if name not in RUN_OPTIONS_ELSEWHERE}
    return resolve_run(architecture, with_padding(own, options, {})[0]).run


def differences(
    kind: str, mapping: Mapping[str, Any], architecture: Architecture, run: Run, *, packed: bool = True
) -> dict[str, Any]:
    """Fields that the written file runs with otherwise, and how; empty when it says the whole run.

    What packed rows are filled to, the name of the file's own framework, and kernels that are taken where their
    packages are installed, are no fields of a file.
    """
    try:
        found = read_back(kind, mapping, architecture, run.num_gpus)
    except InputError as error:
        raise TunecastError(f"The {kind} file of this plan cannot be read back: {error}") from error
    unpadded = packed or run.samples_unevenness is not None
    unsaid = {*LAYOUT, *(["pad_to_multiple_of"] if unpadded else [])}
    unsaid |= {"stack", "stack_version"} if run.stack == kind else set()
    unsaid |= set() if run.gradient_checkpointing else {"reentrant"}
    names = [field.name for field in fields(Run) if field.name not in unsaid]
    found = replace(found, fused_kernels=(*found.fused_kernels, *installed_packages(run)))
    return {name: getattr(found, name) for name in names if getattr(found, name) != getattr(run, name)}


def installed_packages(run: Run) -> tuple[str, ...]:
    """Kernels of the run that no file asks for: transformers takes them where their packages are installed."""
    return tuple(part for part in run.fused_kernels if part in LINEAR_KERNELS)
