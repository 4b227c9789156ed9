"""Stacked experts in bitsandbytes' 4 bits, which dequantize a whole stack whenever the experts run.

Which parameters: axolotl ``monkeypatch/moe_quant.py`` (``quantize_moe_experts``), those of three dimensions or more of
a module that is called experts. How: bitsandbytes ``nn/parametrize.py``, ``replace_parameter_4bit``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunecast.model.run import Run

STACK_DIMENSIONS = 3
"""Of a parameter that stacks matrices."""


def stacks(model: Any) -> Iterator[tuple[Any, str]]:
    """Modules and the names of their parameters that stack the matrices of all experts."""
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim >= STACK_DIMENSIONS and "expert" in f"{path}.{name}".lower():
                yield module, name


def quantize_experts(model: Any, run: Run) -> None:
    """Replace every stack by its packed one; on ``meta`` its shape and dtype are noted, for `pack` to do the same."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for module, name in list(stacks(model)):
        parameter = module.get_parameter(name)
        if parameter.device.type == "meta":
            before = parameter.shape, parameter.dtype
            module.stacks_in_4bit = {**getattr(module, "stacks_in_4bit", {}), name: before}
        else:
            options: dict[str, Any] = {"compress_statistics": run.double_quant, "quant_type": run.bnb_4bit_quant_type}
            replace_parameter_4bit(module, name, **options)


def pack(module: Any, run: Run) -> None:
    """What bitsandbytes makes of the stacks of a module, over fake tensors."""
    from bitsandbytes.nn import parametrize as of_bitsandbytes
    from torch.nn.utils import parametrize

    from tunecast.calibrate.trace.fakes import empty_state, packed_weight

    for name, (shape, dtype) in module.__dict__.pop("stacks_in_4bit", {}).items():
        state = empty_state(shape, dtype, run)
        module._parameters[name] = packed_weight(shape.numel())
        restoring = of_bitsandbytes.Bnb4bitParametrization(state)
        parametrize.register_parametrization(module, name, restoring, unsafe=True)
        of_bitsandbytes._register_parametrization_hooks(module, name)
        module.packed_stacks = [*getattr(module, "packed_stacks", ()), (module.parametrizations[name].original, state)]
