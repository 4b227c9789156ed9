"""Watches the step: every operator call becomes an operation and an entry in the ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tunecast.calibrate.trace import fakes, hf, kernels, offload
from tunecast.calibrate.trace.ledger import Ledger
from tunecast.calibrate.trace.result import Place
from tunecast.model.operation import SOFTMAX, VALUE_READ, Kind, Operation, Phase, plain_layout
from tunecast.model.run import Run

UNSHARED_OWNERS = 2
"""Owners of the storage of a gradient that only the engine holds, as seen from Python: it and the wrapper."""
UNSHARED_HANDLES = 4
"""Handles of such a gradient inside a dispatched call: the engine's buffer, the call's arguments and the wrapper."""


@dataclass(slots=True)
class Recorder:
    """Where the step is, and what it has done since the last `restart`."""

    ledger: Ledger
    vocab_size: int
    platform: str
    run: Run
    phase: Phase = Phase.FORWARD
    layer: int | None = None
    recomputing: bool = False
    to_host: bool = False
    """Whether what appears now is in host memory."""
    stream: list[Operation] = field(default_factory=list)

    def restart(self) -> None:
        """Forget the operations and peaks so far (the first step)."""
        self.stream.clear()
        self.ledger.peaks.clear()

    def begin(self, phase: str) -> None:
        """Observer of `hf.train_step`."""
        self.phase = Phase(phase)
        backward = self.phase is Phase.BACKWARD
        self.move("loss" if backward else phase, tail=backward)

    def move(self, moment: str, layer: int | None = None, *, tail: bool = False) -> None:
        """Enter another place of the step."""
        self.layer = layer
        self.ledger.move_to(Place(moment=moment, layer=layer, tail=tail))

    @contextlib.contextmanager
    def recompute(self) -> Iterator[None]:
        """Entered around every recomputation of a checkpointed layer."""
        before = self.recomputing
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = before

    @contextlib.contextmanager
    def host_copies(self) -> Iterator[None]:
        """Copies to host memory and back: on fake tensors of one device, copies that the ledger does not see."""
        from unittest import mock

        def to_host(tensor: Any) -> Any:
            self.to_host = True
            copied = tensor.clone()
            self.to_host = False
            return copied

        with (
            mock.patch.object(offload, "to_host", to_host),
            mock.patch.object(offload, "to_device", lambda tensor, _: tensor.clone()),
        ):
            yield

    def part_of(self, tensor: Any) -> str:
        """What a new storage is for, from where it appears."""
        if self.phase is Phase.OPTIMIZER:
            return "scratch"
        if tensor.ndim >= 2 and tensor.shape[-1] == self.vocab_size:
            return "logits"
        return "activations"

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Enter the call's new storages and its operation."""
        name = kernels.operator_name(func)
        for tensor in kernels.tensors_in(out):
            if self.to_host:
                self.ledger.ignore(tensor)
            self.ledger.add(tensor, "scratch" if "dequantize" in name else self.part_of(tensor))
        if self._on_host(name, args):
            return
        phase = Phase.RECOMPUTE if self.recomputing else self.phase
        operation = kernels.describe(func, args, kwargs, out, phase=phase, layer=self.layer, vocab_size=self.vocab_size)
        if operation is None:
            return
        if name == kernels.GROUPED and self.run.loops_experts:
            self.read_value(args[2])
            *shape, experts = operation.shape
            layout = plain_layout(operation.layout)
            operation = replace(operation, shape=tuple(shape), launches=float(experts), layout=layout)
        if name == kernels.ADDED:
            self.stream.append(kernels.copied_base(args, out, phase=phase, layer=self.layer))
        if self.platform == "cuda":
            self.stream += kernels.operand_copies(name, args, phase=phase, layer=self.layer)
        self.stream.append(operation)
        if self.platform == "cuda":
            self._as_on_cuda(name, operation)

    def _as_on_cuda(self, name: str, operation: Operation) -> None:
        """What the GPU's version of the call adds: scratch inside the kernel, a synchronisation after it."""
        if operation.kind is Kind.ATTENTION and "backward" in name:
            self.ledger.borrow(kernels.attention_scratch_bytes(operation.shape, operation.layout), "scratch")
        if name in kernels.BNB_UPDATES:
            self.stream.append(kernels.synchronisation(operation.phase))

    def read_value(self, tensor: Any) -> None:
        """The code reads a tensor's value: on a GPU a small copy that waits for all work before it."""
        if self.platform == "cuda":
            phase = Phase.RECOMPUTE if self.recomputing else self.phase
            self.stream.append(kernels.value_read(tensor, phase=phase, layer=self.layer))

    def finds_padding(self, tensor: Any) -> bool:
        """Whether a value that the code reads says that some tokens are padding (``masking_utils.fast_all``)."""
        import torch

        return self.run.has_padding and tensor.dtype is torch.bool

    def accumulates_in_place(self, args: Any) -> bool:
        """Whether the autograd engine would add into the first gradient: it does unless that one is shared.

        For fake tensors it never does (``InputBuffer::accumulate`` excludes subclasses), so it is done for it. A
        reentrant checkpoint runs its layer forward inside the backward, with gradients enabled, which the engine
        has disabled; the gradient it starts from is held by its caller.
        """
        import torch

        if self.phase is not Phase.BACKWARD or self.recomputing or torch.is_grad_enabled():
            return False
        if not isinstance(args[1], torch.Tensor):
            return False
        into, other = args[:2]
        owners = torch._C._storage_Use_Count(into.untyped_storage()._cdata)
        alone = owners <= UNSHARED_OWNERS and into._use_count() <= UNSHARED_HANDLES
        return bool(into.shape == other.shape and into.dtype == other.dtype and alone)

    def _on_host(self, name: str, args: Any) -> bool:
        """Step counters of a foreach optimizer live on the CPU: no kernel on the GPU."""
        counters = self.platform == "cuda" and self.run.optim == "adamw_torch"
        return counters and name == "_foreach_add_" and bool(args[0][0].ndim == 0)


def watching(recorder: Recorder) -> Any:
    """The dispatch mode that shows every operator call to the recorder."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    # Gradients of a gather and of topk are written into fresh zeros in place, but for subclasses of tensors
    # (``index_backward`` and ``value_selecting_reduction_backward`` of FunctionsManual.cpp).
    written = {"index_put": torch.ops.aten.index_put_.default, "scatter": torch.ops.aten.scatter_.src}

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
                return args[0].fake_device
            kwargs = kwargs or {}
            name = kernels.operator_name(func)
            if name == VALUE_READ:
                if recorder.phase is not Phase.OPTIMIZER:
                    recorder.read_value(args[0])
                return 0.0 if recorder.finds_padding(args[0]) else 1.0
            if name == "gemm_4bit":
                with self:
                    return _dequantize_and_multiply(*args, **kwargs)
            if name == "add" and recorder.accumulates_in_place(args):
                func = torch.ops.aten.add_.Tensor
            if name == "_softmax_backward_data" and recorder.platform == "cuda":
                # ``softmax_backward_cuda_out`` (``SoftMax.cu``): gradient times result is written first.
                with self:
                    args = (args[0] * args[1], *args[1:])
                recorder.stream[-1] = replace(recorder.stream[-1], layout=SOFTMAX)
            if name in written and recorder.phase is Phase.BACKWARD and not recorder.recomputing:
                func = written[name]
            out = _made(func, name, args, kwargs)
            recorder.record(func, args, kwargs, out)
            return out

    return Watch()


def _made(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What an operator makes of fake tensors.

    Updates in place of many tensors make none, and finding them in the fake mode's cache takes long. A grouped product
    of fp16 or fp32 is there for real tensors, but of fake ones for bf16 only (``_meta_grouped_mm_common``).
    """
    import torch

    if name.startswith("_foreach") and name.endswith("_"):
        return None
    if name != kernels.GROUPED or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    half = [torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16, device=x.device) for x in args[:2]]
    made = func(*half, *args[2:], **kwargs)
    return torch.empty_strided(made.shape, made.stride(), dtype=args[0].dtype, device=made.device)


def _dequantize_and_multiply(
    a: Any,
    packed: Any,
    shape: Any,
    absmax: Any,
    blocksize: int,
    quant_type: str,
    bias: Any = None,
    absmax_8bit: Any = None,
    absmax_code: Any = None,
    absmax_offset: Any = None,
) -> Any:
    """bitsandbytes' ``_dequant_linear_fallback``, which CUDA runs beyond 1,536 tokens and the CPU always."""
    import torch

    ops = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        first = ops.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, fakes.NESTED_BLOCK, torch.float32)
        absmax = first + absmax_offset
    weight = ops.dequantize_4bit.default(packed, absmax, blocksize, quant_type, shape, a.dtype)
    rows = a.reshape(-1, a.shape[-1])
    product = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return product.view(*a.shape[:-1], weight.shape[0])


def follow(recorder: Recorder, model: Any) -> None:
    """Follow the step through layers and head, forward and backward, by hooks of modules and gradients."""
    for index, layer in enumerate(hf.decoder_layers(model)):
        layer.register_forward_pre_hook(_entering(recorder, index))
        layer.register_forward_hook(_leaving(recorder, index))
    model.get_output_embeddings().register_forward_pre_hook(_entering_head(recorder))
    if recorder.run.loss_type != "nll":
        model.get_decoder().register_forward_hook(_leaving_decoder(recorder))
    for parameter in hf.trainable_parameters(model):
        parameter.register_post_accumulate_grad_hook(lambda p: recorder.ledger.retag(p.grad, "gradients"))


def _entering(recorder: Recorder, index: int) -> Any:
    def hook(_: Any, args: Any) -> None:
        recorder.move("forward" if recorder.phase is Phase.FORWARD else "backward", index)
        if index == 0 and args[0].requires_grad and args[0].grad_fn is not None:
            args[0].register_hook(lambda _: recorder.move("backward", tail=True))

    return hook


def _leaving(recorder: Recorder, index: int) -> Any:
    def hook(_: Any, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: recorder.move("backward", index))
        if recorder.phase is Phase.FORWARD:
            recorder.move("forward", tail=True)

    return hook


def _entering_head(recorder: Recorder) -> Any:
    def hook(_: Any, args: Any) -> None:
        recorder.move("loss")
        if args[0].requires_grad:
            args[0].register_hook(lambda _: recorder.move("backward"))

    return hook


def _leaving_decoder(recorder: Recorder) -> Any:
    """For loss paths that do not call the head as a module."""

    def hook(_: Any, __: Any, output: Any) -> None:
        recorder.move("loss")
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(lambda _: recorder.move("backward"))

    return hook
