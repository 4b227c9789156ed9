"""Recorded defaults of frameworks and stacks against those of the installed packages: which have changed.

Run it in an environment that has the frameworks: every one that is installed is compared, the others are named.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import tempfile
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.configs.frameworks import differences, framework_range, load_frameworks
from tunecast.model.stack_versions import BASE, chosen_ranges, defaults_then
from tunecast.model.stacks import DTYPE_ALIASES, load_stacks, stack_defaults


def class_defaults(path: str) -> dict[str, Any]:
    """Field defaults of a dataclass or pydantic model, named ``module:Class``."""
    module, _, name = path.partition(":")
    cls = getattr(import_module(module), name)
    if dataclasses.is_dataclass(cls):
        stated = {field.name: field.default for field in dataclasses.fields(cls)}
        return {name: value for name, value in stated.items() if value is not dataclasses.MISSING}
    return {name: field.default for name, field in cls.model_fields.items() if not field.is_required()}


def framework_drift(framework: str) -> list[str]:
    """Differences of one installed framework, for the range that its version lies in."""
    facts = load_frameworks()[framework]
    recorded = framework_range(framework, version(facts["package"]))["defaults"]
    installed: dict[str, Any] = {}
    for path in facts["classes"]:
        installed = class_defaults(path) | installed
    return differences(recorded, installed)


def of_transformers() -> dict[str, Any]:
    """Optimizer of the Trainer, and kind of checkpointing, by its own code."""
    import transformers

    enabling = inspect.getsource(transformers.PreTrainedModel.gradient_checkpointing_enable)
    if "use_reentrant" not in enabling:
        enabling = inspect.getsource(transformers.modeling_utils)
    kinds = set(re.findall(r'"use_reentrant": (True|False)', enabling))
    optim = class_defaults("transformers:TrainingArguments")["optim"]
    return {"optim": getattr(optim, "value", optim), "reentrant": None if len(kinds) != 1 else kinds == {"True"}}


def of_peft() -> dict[str, Any]:
    """Storage of adapters beside a 16-bit base."""
    import peft

    raised = inspect.signature(peft.get_peft_model).parameters["autocast_adapter_dtype"].default
    return {"adapter_dtype": "fp32" if raised else BASE}


def of_trl() -> dict[str, Any]:
    """What ``trl sft`` does unless told, after its configuration has filled itself in."""
    import trl

    stated = class_defaults("trl:ModelConfig") | class_defaults("trl:SFTConfig")
    with tempfile.TemporaryDirectory() as folder:
        filled = trl.SFTConfig(output_dir=folder, bf16=False, report_to="none")
    tiled = hasattr(trl.trainer.utils, "add_fused_lm_head")
    dtype = str(stated["dtype"])
    return {
        "loss_type": "chunked_nll" if tiled else filled.loss_type,
        "gradient_checkpointing": stated["gradient_checkpointing"],
        "dtype": DTYPE_ALIASES.get(dtype, dtype),
        "lora_r": stated["lora_r"],
        "lora_dropout": stated["lora_dropout"],
    }


PROBES = {"transformers": of_transformers, "peft": of_peft, "trl": of_trl}
"""What an installed package itself says of fields of a run with LoRA."""


def stack_drift(stack: str) -> dict[str, list[str]]:
    """Differences of each installed package of a stack, by package and the range that its version lies in."""
    found: dict[str, list[str]] = {}
    for package in load_stacks()[stack].get("packages", {}):
        if package not in PROBES:
            continue
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        chosen = chosen_ranges(stack, f"{package}={installed}")
        (own,) = [one for one in chosen if one.package == package]
        recorded = defaults_then(stack_defaults(stack, "lora"), (own,), "lora")  # as asked for by version
        found[f"{stack}: {package} {installed} ({own.versions})"] = differences(recorded, PROBES[package]())
    return found


def told_stacks() -> bool:
    """Print what has drifted of the stacks; whether anything has."""
    drifted = False
    for stack in load_stacks():
        for title, lines in stack_drift(stack).items():
            drifted = drifted or bool(lines)
            print(f"stack {title}: {'no drift' if not lines else ''}", *lines, sep="\n  " if lines else "")
    return drifted


def main() -> int:
    """Print what has drifted; 3 when anything has, as other answers of no."""
    drifted = told_stacks()
    for framework, facts in load_frameworks().items():
        if "classes" not in facts:
            continue
        try:
            lines = framework_drift(framework)
        except PackageNotFoundError:
            print(f"{framework}: not installed", file=sys.stderr)
            continue
        except InputError as error:
            lines = [str(error)]
        drifted = drifted or bool(lines)
        print(f"{framework}: {'no drift' if not lines else ''}", *lines, sep="\n  " if lines else "")
    return 3 if drifted else 0


if __name__ == "__main__":
    sys.exit(main())
