"""Which kernels of linear attention a machine runs is what is installed on it: told, refused or followed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tunecast.calibrate import linear_kernels
from tunecast.calibrate.linear_kernels import check_installed_kernels, installed_kernels, refuse_traced_kernels
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architectures import load_architecture
from tunecast.model.resolve import resolve_run

QWEN = load_architecture("Qwen/Qwen3.5-9B")
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install("fla")``: the machine has these packages and no others."""

    def found(*packages: str) -> None:
        spec: Any = SimpleNamespace()
        monkeypatch.setattr(linear_kernels, "find_spec", lambda name: spec if name in packages else None)

    return found


def test_packages_matter_to_linear_attention_alone(install: Install) -> None:
    install("fla", "causal_conv1d")
    assert installed_kernels(QWEN) == ("fla", "causal-conv1d")
    assert installed_kernels(load_architecture("Qwen/Qwen3-8B")) == ()
    install("causal_conv1d")
    assert installed_kernels(QWEN) == ("causal-conv1d",)


@pytest.mark.parametrize(("asked", "packages"), [("fla", ()), ("none", ("fla",)), ("fla", ("fla", "causal_conv1d"))])
def test_a_run_is_not_measured_with_other_kernels_than_it_has(
    install: Install, asked: str, packages: tuple[str, ...]
) -> None:
    install(*packages)
    run = resolve_run(QWEN, {"method": "lora", "fused_kernels": asked}).run
    with pytest.raises(InputError, match="by what is installed; type --fused-kernels"):
        check_installed_kernels(QWEN, run)
    install(*(linear_kernels.PACKAGES[name] for name in run.fused_kernels))
    check_installed_kernels(QWEN, run)


def test_kernels_that_need_a_gpu_are_not_traced(install: Install) -> None:
    plain, fused = (resolve_run(QWEN, {"method": "lora", "fused_kernels": each}).run for each in ("none", "fla"))
    install()
    refuse_traced_kernels(QWEN, plain)
    with pytest.raises(NotSupportedError, match="kernels of fla need a GPU; use tunecast estimate without --exact"):
        refuse_traced_kernels(QWEN, fused)
    install("fla")
    with pytest.raises(NotSupportedError, match="leave --exact out and type --fused-kernels fla"):
        refuse_traced_kernels(QWEN, plain)
