"""Direct traces: whole steps at a given depth, and the optimizer phase alone."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tunecast.calibrate.bitsandbytes_setup import quiet_bitsandbytes
from tunecast.calibrate.linear_kernels import refuse_traced_kernels
from tunecast.calibrate.trace import dora, fakes, flash, hf, kernels
from tunecast.calibrate.trace.ledger import Ledger, Peak
from tunecast.calibrate.trace.recorder import Recorder, follow, watching
from tunecast.calibrate.trace.result import TensorSpec, Trace, timeline
from tunecast.model.architecture import Architecture
from tunecast.model.operation import Operation, Phase
from tunecast.model.run import Run

EMBEDDING_IN_NAME = re.compile(r"^(?!.*lora_).*(embed|\.wte\.|\.wpe\.)")
"""Names of embedding tables in every transformers model; an adapter on one is no table."""
PAGED_ELEMENTS = 1e5
"""State tensors at least this large go to managed memory (bitsandbytes ``get_state_buffer``)."""


def trace_depth(architecture: Architecture, run: Run, num_layers: int, *, platform: str = "cuda") -> Trace:
    """Trace one step at the given depth, after an update that made the optimizer state."""
    recorder = Recorder(ledger=Ledger(), vocab_size=architecture.vocab_size, platform=platform, run=run)
    model = _meta_model(architecture, run, num_layers, recorder)
    with _fake_mode(platform):
        fakes.make_fake(model, run)
        _enter_weights(recorder.ledger, model)
        loaded_bytes = recorder.ledger.total_bytes
        follow(recorder, model)
        batch = _fake_batch(run, recorder.ledger)
        optimizer = _fake_optimizer(hf.trainable_parameters(model), run, platform, hf.embedding_parameters(model))
        scaler = _fake_scaler(recorder)
        with watching(recorder), recorder.host_copies():
            _update(recorder, hf.trainable_parameters(model), optimizer, scaler)
            recorder.restart()
            rest_parts = dict(recorder.ledger.alive)
            hf.train_step(model, batch, optimizer, run, platform=platform, observer=recorder.begin, scaler=scaler)
        peaks = dict(recorder.ledger.peaks)
        return Trace(
            stream=tuple(recorder.stream),
            memory=timeline(peaks, rest_parts, loaded_bytes),
            trainable_params=sum(p.numel() for p in hf.trainable_parameters(model)),
            total_params=_total_params(model),
            trained=_specs(model),
            peaks=peaks,
            rest_parts=rest_parts,
        )


def _meta_model(architecture: Architecture, run: Run, num_layers: int, recorder: Recorder) -> Any:
    refuse_traced_kernels(architecture, run)
    flash.refuse_third(run)
    quiet_bitsandbytes()
    with warnings.catch_warnings(), flash.without_the_package(), dora.without_values():
        warnings.simplefilter("ignore", FutureWarning)  # transformers tells its own callers what to rename.
        warnings.simplefilter("ignore", UserWarning)  # PEFT tells what it sets by itself (GPT-2's fan_in_fan_out).
        warnings.simplefilter("ignore", RuntimeWarning)  # PEFT's own patterns for stacked experts of some families.
        return hf.build_model(
            architecture, run, device="meta", num_layers=num_layers, recompute_context=recorder.recompute
        )


def trace_update(
    trained: Sequence[TensorSpec], run: Run, rest_parts: dict[str, int], *, platform: str = "cuda"
) -> tuple[list[Operation], Peak]:
    """The optimizer phase of a step for these parameters: its kernels and its peak.

    `rest_parts` is what the whole model holds at rest; parameters traced here are part of it.
    """
    import torch

    recorder = Recorder(ledger=Ledger(), vocab_size=0, platform=platform, run=run)
    with _fake_mode(platform):
        params = [torch.nn.Parameter(torch.empty(s.shape, dtype=hf.torch_dtype(s.dtype))) for s in trained]
        for parameter in params:
            recorder.ledger.add(parameter, "weights")
        embeddings = [p for p, spec in zip(params, trained, strict=True) if EMBEDDING_IN_NAME.search(spec.name)]
        optimizer = _fake_optimizer(params, run, platform, embeddings)
        scaler = _fake_scaler(recorder)
        with watching(recorder):
            _update(recorder, params, optimizer, scaler)
            _update(recorder, params, optimizer, scaler)
    (peak,) = recorder.ledger.peaks.values()
    parts = {**rest_parts, "gradients": peak.parts["gradients"], "scratch": peak.parts["scratch"]}
    return recorder.stream, replace(peak, bytes=sum(parts.values()), parts=parts)


def _update(recorder: Recorder, params: list[Any], optimizer: Any, scaler: Any | None) -> None:
    """The optimizer phase alone, with empty gradients; what was recorded before is forgotten."""
    import torch

    for parameter in params:
        parameter.grad = torch.empty_like(parameter)
        recorder.ledger.retag(parameter.grad, "gradients")
    recorder.restart()
    recorder.begin(Phase.OPTIMIZER)
    hf.update(params, optimizer, platform=recorder.platform, scaler=scaler)
    _enter_state(recorder, optimizer)


@contextlib.contextmanager
def _fake_mode(platform: str) -> Iterator[None]:
    """Fake tensors on which transformers and PEFT behave as on real ones of the platform.

    transformers would build attention masks for fake tensors that it skips for real, unpadded
    batches. PEFT's 4-bit layer asks for autocast without naming a device, which means CUDA's. Dropout is one
    fused kernel on CUDA alone.
    bitsandbytes brings its real quantization maps.
    """
    from unittest import mock

    import torch
    import transformers.masking_utils
    from peft.tuners.lora.layer import Linear
    from torch._subclasses.fake_tensor import FakeTensorMode

    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_no_tracebacks())
        stack.enter_context(dora.without_values())
        stack.enter_context(flash.without_the_package())
        # Plain functions: a Mock would keep the tensors it was called with alive.
        stack.enter_context(mock.patch.object(transformers.masking_utils, "is_tracing", _never_tracing))
        if platform == "cuda":
            enabled = torch.is_autocast_enabled
            stack.enter_context(mock.patch.object(torch, "is_autocast_enabled", lambda device="cpu": enabled(device)))
            functional = torch.nn.functional
            stack.enter_context(mock.patch.object(functional, "layer_norm", _wide_layer_norm(functional.layer_norm)))
            stack.enter_context(mock.patch.object(torch, "pow", _wide_power(torch.pow)))
            attention = functional.scaled_dot_product_attention
            stack.enter_context(mock.patch.object(functional, attention.__name__, _dropping_inside(attention)))
            stack.enter_context(mock.patch.object(torch.nn.functional, "dropout", _fused_dropout))
            stack.enter_context(mock.patch.object(torch.nn.functional, "softmax", _softmax_as_on_cuda))
            stack.enter_context(mock.patch.object(torch.Tensor, "sum", _wide_sum(torch.Tensor.sum)))
            stack.enter_context(mock.patch.object(torch.Tensor, "softmax", _softmax_as_on_cuda))
            stack.enter_context(mock.patch.object(Linear, "get_delta_weight", _delta_weight_as_on_cuda))
            call = _attention_as_on_cuda(functional.scaled_dot_product_attention)
            stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", call))
        yield


@contextlib.contextmanager
def _no_tracebacks() -> Iterator[None]:
    """What a fake tensor cannot do is raised; torch would log the traceback as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _softmax_as_on_cuda(x: Any, dim: int, dtype: Any = None, **_: Any) -> Any:
    """``softmax(x, dim, dtype=float32)`` of an fp16 tensor: a GPU converts inside the kernel, a CPU makes a copy.

    A bf16 tensor is cast first on both (PyTorch ``SoftMax.cpp``).
    """
    import torch

    if dtype is None and torch.is_autocast_enabled("cpu"):
        dtype = torch.float32  # ``autocast_mode.h``, FP32_SET_OPT_DTYPE
    converts = dtype is torch.float32 and x.dtype is torch.float16
    return torch._softmax(x, dim, True) if converts else torch.softmax(x, dim, dtype=dtype)


def _delta_weight_as_on_cuda(layer: Any, adapter: str) -> Any:
    """What an adapter adds to a router's weight, in the adapter's dtype: PEFT casts 16 bits to fp32 on a CPU alone."""
    from peft.utils.other import transpose

    product = layer.lora_B[adapter].weight @ layer.lora_A[adapter].weight
    return transpose(product, layer.fan_in_fan_out) * layer.scaling[adapter]


def _fused_dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout as CUDA runs it: one kernel and a mask of one byte per element (``Dropout.cpp``); a CPU composes it."""
    import torch

    del inplace
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def _wide_layer_norm(layer_norm: Any) -> Any:
    """CUDA's autocast runs layer norms in fp32, result included; the CPU's leaves them alone.

    Source: PyTorch ``autocast_mode.h``, AT_FORALL_FP32 against ``autocast_mode.cpp``'s CPU lists.
    """
    import torch

    def wide(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        if torch.is_autocast_enabled("cpu"):
            x, weight, bias = (None if tensor is None else tensor.float() for tensor in (x, weight, bias))
        return layer_norm(x, shape, weight, bias, eps)

    return wide


def _wide_power(power: Any) -> Any:
    """CUDA's autocast runs powers in fp32, the CPU's does not (``autocast_mode.h``, AT_FORALL_FP32)."""
    import torch

    def wide(x: Any, exponent: Any) -> Any:
        lifts = isinstance(x, torch.Tensor) and torch.is_autocast_enabled("cpu")
        return power(x.float() if lifts else x, exponent)

    return wide


def _attention_as_on_cuda(plain: Any) -> Any:
    """Heads whose values are narrower than their keys (latent attention): CUDA's memory-efficient kernel takes them.

    The flash kernel wants equal widths (``sdp_utils.cpp``), and a CPU then multiplies everything out.
    """
    import torch

    def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, **options: Any) -> Any:
        if q.shape[-1] == v.shape[-1]:
            return plain(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, **options)
        if torch.is_autocast_enabled("cpu"):
            q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
        if attn_mask is not None and attn_mask.dtype is torch.bool:  # ``convert_boolean_attn_mask``
            zero, never = (torch.scalar_tensor(value, dtype=q.dtype) for value in (0.0, -torch.inf))
            attn_mask = torch.where(attn_mask, zero, never)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        causal, scale = options.get("is_causal", False), options.get("scale")
        return efficient(q, k, v, attn_mask, True, dropout_p, causal, scale=scale)[0]

    return attention


def _wide_sum(plain: Any) -> Any:
    """CUDA's autocast sums 16-bit numbers into fp32, the CPU's does not (``autocast_mode.h``, FP32_SET_OPT_DTYPE)."""
    import torch

    def wide(x: Any, *args: Any, **kwargs: Any) -> Any:
        narrow = x.dtype in (torch.bfloat16, torch.float16) and "dtype" not in kwargs
        if narrow and torch.is_autocast_enabled("cpu"):
            kwargs["dtype"] = torch.float32
        return plain(x, *args, **kwargs)

    return wide


def _dropping_inside(attention: Any) -> Any:
    """A GPU's fused attention drops inside the kernel; the CPU's would give way to plain products."""

    def fused(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Any:
        del dropout_p
        return attention(*args, **kwargs)

    return fused


def _never_tracing(tensor: Any = None) -> bool:
    """Stands for transformers' ``is_tracing``."""
    del tensor
    return False


def _fake_optimizer(params: list[Any], run: Run, platform: str, embeddings: list[Any]) -> Any:
    """The run's optimizer over fake parameters; bitsandbytes' reads values while it is built."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), warnings.catch_warnings():
        optimizer = hf.make_optimizer(params, run, platform=platform, embeddings=embeddings)
    if platform == "cuda":
        optimizer._cpu_paged_warned = True
    return optimizer


def _fake_scaler(recorder: Recorder) -> Any | None:
    """The run's gradient scaler, told that no gradient overflowed: fakes have no values to look at."""
    import torch

    if hf.make_scaler(recorder.run, "cpu") is None:
        return None

    class NeverOverflows(torch.amp.GradScaler):  # type: ignore[misc]
        def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
            for found in optimizer_state["found_inf_per_device"].values():
                recorder.read_value(found)
            return optimizer.step(*args, **kwargs)

    scaler = NeverOverflows("cpu")
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    for tensor in (scaler._scale, scaler._growth_tracker):
        recorder.ledger.add(tensor, "optimizer_state")
    return scaler


def _fake_batch(run: Run, ledger: Ledger) -> dict[str, Any]:
    import torch

    shape = (run.per_device_train_batch_size, run.max_length)
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")}
    if run.has_padding:
        batch["attention_mask"] = torch.zeros(shape, dtype=torch.int64)
    for tensor in batch.values():
        ledger.add(tensor, "activations")
    return batch


def _enter_weights(ledger: Ledger, model: Any) -> None:
    for tensor in fakes.quantized_tensors(model):
        ledger.add(tensor, "quantized")
    for name, parameter in model.named_parameters():
        ledger.add(parameter, "adapters" if "lora_" in name else "weights")
    for buffer in model.buffers():
        ledger.add(buffer, "weights")


def _enter_state(recorder: Recorder, optimizer: Any) -> None:
    """Optimizer state to its part; paged state and host counters are not in the GPU's allocator."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if kernels.tensors_in(value):
                if recorder.platform == "cuda" and _outside_allocator(key, value, recorder.run.optim):
                    recorder.ledger.forget(value)
                else:
                    recorder.ledger.retag(value, "optimizer_state")


def _outside_allocator(key: str, value: Any, optim: str) -> bool:
    """Paged moments live in managed memory, step counters of foreach AdamW on the host."""
    if optim.startswith("paged"):
        return key.startswith("state") and value.numel() >= PAGED_ELEMENTS
    return optim == "adamw_torch" and value.ndim == 0


def _total_params(model: Any) -> int:
    """Unique parameters, a 4-bit weight counted by its elements."""
    packed = {id(weight): state.shape.numel() for m in model.modules() for weight, state in fakes.packed(m)}
    return sum(packed.get(id(p), p.numel()) for p in model.parameters())


def _specs(model: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=name, shape=tuple(p.shape), dtype=kernels.dtype_name([p]))
        for name, p in model.named_parameters()
        if p.requires_grad
    )
