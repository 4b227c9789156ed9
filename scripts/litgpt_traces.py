"""Trace LitGPT's own training step on fake tensors and write what it holds, for the tests of the formulas.

    python -m pip install --no-deps --target DIR litgpt==0.5.13 lightning lightning-utilities jsonargparse torchmetrics
    python -m pip install --no-deps --target BNB bitsandbytes==0.49.2
    PYTHONPATH=BNB:DIR python scripts/litgpt_traces.py litgpt-0.5.11

litgpt pins packages that the rest of this project does not go with, so it is installed beside them, without
dependencies. The model, its adapters, Lightning's Fabric with its precision plugins, the chunked loss and torch's AdamW
are the real code; the training loop is that of ``litgpt/finetune/{lora,full}.py``, cut to one step. bitsandbytes 0.42,
which litgpt 0.3 to 0.5.4 pin, does not import beside today's torch: its one difference, inputs kept on the autograd
context, is added to 0.49. Paged optimizer state is left out. Figures go to tests/fixtures/litgpt_traces.json, those of
the other age of the code stay.
"""

from __future__ import annotations

import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tunecast.calibrate.trace import fakes
from tunecast.calibrate.trace.direct import _enter_state, _fake_mode
from tunecast.calibrate.trace.ledger import Ledger
from tunecast.calibrate.trace.recorder import Recorder, watching
from tunecast.calibrate.trace.result import timeline
from tunecast.model.litgpt import CODES, SLICED, STABLE
from tunecast.model.operation import Phase
from tunecast.model.run import Run

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "litgpt_traces.json"
QUANTIZED = {"nf4": ("nf4", False), "nf4-dq": ("nf4", True), None: (None, False)}
ALPHA = 16
"""Any value: the scaling is one multiplication whatever it is."""
QV = "query,value"
ALL = "query,key,value,projection,mlp,head"
CASES: tuple[dict[str, Any], ...] = (
    {"model": "meta-llama/Llama-2-7b-hf", "name": "Llama-2-7b-hf", "method": "lora", "length": 1304},
    {"model": "meta-llama/Llama-2-7b-hf", "name": "Llama-2-7b-hf", "method": "qlora", "quant": "nf4", "length": 512},
    {"model": "microsoft/phi-1_5", "name": "phi-1_5", "method": "lora", "length": 1044, "batch": 2},
    {"model": "microsoft/phi-1_5", "name": "phi-1_5", "method": "qlora", "quant": "nf4-dq", "length": 1044},
    {"model": "stabilityai/stablelm-base-alpha-3b", "name": "stablelm-base-alpha-3b", "method": "lora", "length": 700},
    {"model": "tiiuae/falcon-7b", "name": "falcon-7b", "method": "lora", "length": 512, "layers": 6},
    {"model": "tiiuae/falcon-40b", "name": "falcon-40b", "method": "lora", "targets": ALL, "length": 256, "layers": 4},
    {"model": "google/gemma-2b", "name": "Gemma-2b", "method": "lora", "targets": ALL, "length": 512, "batch": 2},
    {"model": "meta-llama/Llama-3.2-1B", "name": "Llama-3.2-1B", "method": "full", "length": 512, "batch": 4},
    {"model": "microsoft/Phi-3-mini-4k-instruct", "name": "Phi-3-mini-4k-instruct", "method": "qlora", "quant": "nf4",
     "targets": ALL, "length": 512, "batch": 4, "layers": 6},
    {"model": "mistralai/Mistral-7B-v0.1", "name": "Mistral-7B-v0.1", "method": "qlora", "quant": "nf4-dq",
     "length": 512, "batch": 2, "layers": 6},
    {"model": "google/gemma-2-2b", "name": "Gemma-2-2b", "method": "lora", "targets": ALL, "length": 512, "batch": 2,
     "layers": 6},
    {"model": "google/gemma-2-2b", "name": "Gemma-2-2b", "method": "qlora", "quant": "nf4", "length": 384, "batch": 2,
     "micro": 2, "layers": 4},
    {"model": "Qwen/Qwen3-8B", "name": "Qwen3-8B", "method": "lora", "length": 512, "batch": 2, "layers": 4},
    {"model": "Qwen/Qwen3-8B", "name": "Qwen3-8B", "method": "full", "length": 256, "layers": 2},
    {"model": "google/gemma-3-1b-pt", "name": "Gemma-3-1b-it", "method": "lora", "length": 512, "layers": 7},
    {"model": "meta-llama/Llama-3.2-1B", "name": "Llama-3.2-1B", "method": "lora", "length": 512, "micro": 2,
     "precision": "bf16-mixed", "layers": 6},
    {"model": "microsoft/phi-2", "name": "phi-2", "method": "full", "length": 300, "micro": 2, "layers": 4,
     "precision": "bf16-mixed"},
)  # fmt: skip


def as_run(case: dict[str, Any]) -> Run:
    """The case as far as the recorder and the fake weights need it."""
    kind, double = QUANTIZED[case.get("quant")]
    mixed = case.get("precision") == "bf16-mixed"
    return Run(
        method=case["method"],
        bnb_4bit_quant_type=kind,
        double_quant=double,
        dtype="fp32" if mixed else "bf16",
        precision="bf16-autocast" if mixed else "bf16",
        adapter_dtype="fp32" if mixed else "bf16",
        max_length=case["length"],
        per_device_train_batch_size=case.get("batch", 1),
        gradient_accumulation_steps=case.get("micro", 1),
        gradient_checkpointing=False,
    )


def meta_model(case: dict[str, Any], run: Run) -> Any:
    """LitGPT's model on the meta device, adapters and frozen parameters as its script makes them."""
    import torch

    changes = {"n_layer": case["layers"]} if "layers" in case else {}
    torch.set_default_dtype(torch.float32 if run.autocast else torch.bfloat16)
    try:
        with torch.device("meta"):
            if case["method"] == "full":
                from litgpt import model as plain

                return plain.GPT(plain.Config.from_name(case["name"], **changes))
            from litgpt import lora as adapted

            chosen = {f"lora_{word}": True for word in case.get("targets", QV).split(",")}
            told = {"lora_r": 8, "lora_alpha": ALPHA, "lora_dropout": 0.05, **chosen, **changes}
            model = adapted.GPT(adapted.Config.from_name(case["name"], **told))
            adapted.mark_only_lora_as_trainable(model)
            return model
    finally:
        torch.set_default_dtype(torch.float32)


def quantize(model: Any, run: Run) -> None:
    """Every linear map as bitsandbytes' 4-bit one (``BitsandbytesPrecision.convert_module``)."""
    import bitsandbytes as bnb
    import torch

    options = {"quant_type": run.bnb_4bit_quant_type, "compress_statistics": run.double_quant}
    for name in [n for n, m in model.named_modules() if type(m) is torch.nn.Linear]:
        old = model.get_submodule(name)
        new = bnb.nn.Linear4bit(
            old.in_features, old.out_features, bias=False, compute_dtype=torch.bfloat16, **options, device="meta"
        )
        new.bias = old.bias
        new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, **options, module=new)
        model.set_submodule(name, new)


def multiply_as_then(code: str) -> None:
    """bitsandbytes' product as on a GPU: the weight unpacked in fp16, and (0.42) the input kept on the context."""
    import bitsandbytes.autograd._functions as functions

    class Kept(functions.MatMul4Bit):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, a: Any, b: Any, out: Any = None, bias: Any = None, quant_state: Any = None) -> Any:
            ctx.kept = a
            return functions.MatMul4Bit.forward(ctx, a, b, out, bias, quant_state)

    product = Kept if code not in SLICED else functions.MatMul4Bit

    def forward(self: Any, x: Any) -> Any:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        made = product.apply(x.to(self.compute_dtype), self.weight.t(), None, bias, self.packed_state)
        return made.to(x.dtype)

    fakes._packed_class().forward = forward  # type: ignore[attr-defined]


def fabric_of(run: Run) -> Any:
    """Lightning's Fabric with the precision of the run; the quantizing plugin asks for a GPU when it is chosen."""
    import lightning
    import torch
    from lightning.fabric.plugins import BitsandbytesPrecision

    if run.bnb_4bit_quant_type is None:
        return lightning.Fabric(devices=1, accelerator="cpu", precision="bf16-mixed" if run.autocast else "bf16-true")
    fabric = lightning.Fabric(devices=1, accelerator="cpu")
    mode = run.bnb_4bit_quant_type + ("-dq" if run.double_quant else "")
    fabric._strategy.precision = fabric._precision = BitsandbytesPrecision(mode, torch.bfloat16)
    return fabric


def stable_embedding(model: Any) -> None:
    """What ``finetune/lora.py`` does with the embedding of a quantized base since 0.5; inside fake mode."""
    import torch
    from bitsandbytes.nn import StableEmbedding

    old = model.transformer.wte
    new = StableEmbedding(old.num_embeddings, old.embedding_dim)
    for module in new.modules():
        for name, parameter in list(module._parameters.items()):
            module._parameters[name] = torch.nn.Parameter(torch.empty(parameter.shape, dtype=old.weight.dtype))
    model.transformer.wte = new


def enter_weights(recorder: Recorder, model: Any) -> None:
    """Everything that is there before the first step."""
    for tensor in fakes.quantized_tensors(model):
        recorder.ledger.add(tensor, "quantized")
    for name, parameter in model.named_parameters():
        recorder.ledger.add(parameter, "adapters" if "lora_" in name else "weights")
    for buffer in model.buffers():
        recorder.ledger.add(buffer, "weights")


def follow(recorder: Recorder, model: Any) -> None:
    """Follow the step through layers and head, forward and backward."""

    def entering(index: int) -> Any:
        def hook(_: Any, args: Any) -> None:
            recorder.move("forward", index)
            if index == 0 and args[0].grad_fn is not None:
                args[0].register_hook(lambda _: recorder.move("backward", tail=True))

        return hook

    def leaving(index: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: recorder.move("backward", index))
            recorder.move("forward", tail=True)

        return hook

    def entering_head(_: Any, __: Any, output: Any) -> None:
        recorder.move("loss")
        output.register_hook(lambda _: recorder.move("backward"))

    for index, layer in enumerate(model.transformer.h):
        layer.register_forward_pre_hook(entering(index))
        layer.register_forward_hook(leaving(index))
    model.transformer.ln_f.register_forward_hook(entering_head)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: recorder.ledger.retag(p.grad, "gradients"))


class Loop:
    """The training loop of ``fit``: what it has by name from one micro-batch to the next is an attribute here."""

    def __init__(self, recorder: Recorder, fabric: Any, wrapped: Any, run: Run) -> None:
        import torch

        shape = (run.per_device_train_batch_size, run.max_length)
        self.ids, self.labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        for tensor in (self.ids, self.labels):
            recorder.ledger.add(tensor, "activations")
        self.recorder, self.fabric, self.wrapped, self.run = recorder, fabric, wrapped, run
        self.logits: Any = None

    def micro_batch(self) -> None:
        """Forward, loss and backward."""
        from litgpt.utils import chunked_cross_entropy

        self.recorder.begin("forward")
        if self.run.has_adapters:
            self.logits = self.wrapped(self.ids, lm_head_chunk_size=128)
            self.logits[-1] = self.logits[-1][..., :-1, :]
            loss = chunked_cross_entropy(self.logits, self.labels[..., 1:])
        else:
            self.logits = self.wrapped(self.ids)
            loss = chunked_cross_entropy(self.logits[..., :-1, :], self.labels[..., 1:])
        self.recorder.begin("backward")
        self.fabric.backward(loss / self.run.gradient_accumulation_steps)

    def step(self, optimizer: Any, params: list[Any]) -> None:
        """All micro-batches and the update; paged state is not the allocator's, so its update is left out."""
        for _ in range(self.run.gradient_accumulation_steps):
            self.micro_batch()
        self.recorder.begin("optimizer")
        if optimizer is not None:
            optimizer.step()
            _enter_state(self.recorder, optimizer)
        for parameter in params:
            parameter.grad = None


def traced(case: dict[str, Any], code: str) -> dict[str, Any]:
    """Peak, moments, resting state and FLOPs of the second step."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    run = as_run(case)
    model = meta_model(case, run)
    recorder = Recorder(ledger=Ledger(), vocab_size=model.config.padded_vocab_size, platform="cuda", run=run)
    fabric = fabric_of(run)
    if run.bnb_4bit_quant_type is not None:
        quantize(model, run)
        multiply_as_then(code)
    wrapped = fabric.setup_module(model, move_to_device=False)
    with _fake_mode("cuda"):
        fakes.make_fake(model, run)
        for module in model.modules():
            if hasattr(module, "packed_state"):
                module.packed_state.dtype = torch.float16
        if run.bnb_4bit_quant_type is not None and code in STABLE:
            stable_embedding(model)
        model.max_seq_length = run.max_length
        enter_weights(recorder, model)
        follow(recorder, model)
        params = [p for n, p in model.named_parameters() if p.requires_grad and (not run.has_adapters or "lora_" in n)]
        with unset_fake_temporarily():
            optimizer = None if run.bnb_4bit_quant_type else torch.optim.AdamW(params, foreach=True)
        loop = Loop(recorder, fabric, wrapped, run)
        with watching(recorder):
            loop.step(optimizer, params)
            for tensor in (*model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)):
                recorder.ledger.retag(tensor, "weights")
            at_rest = dict(recorder.ledger.alive)
            recorder.restart()
            loop.step(optimizer, params)
        memory = timeline(dict(recorder.ledger.peaks), at_rest, 0)
    products = [op.flops for op in recorder.stream if op.phase is not Phase.OPTIMIZER]
    return {
        "case": case,
        "code": code,
        "peak_bytes": memory.peak_bytes,
        "peak_moment": memory.peak_moment,
        "moments": {name: size for name, size in memory.moments.items() if name != "load"},
        "flops": sum(products),
        "trained_params": sum(parameter.numel() for parameter in params),
    }


def known_names() -> set[str]:
    """Models that the installed litgpt has."""
    from litgpt.config import name_to_config

    return set(name_to_config)


def main() -> None:
    """Trace every case by the litgpt that is installed and replace its age's figures in the file."""
    code = sys.argv[1] if len(sys.argv) > 1 else ""
    if code not in CODES:
        sys.exit(f"give the age of the installed code: {' or '.join(CODES)}")
    warnings.simplefilter("ignore")
    kept = json.loads(OUT.read_text(encoding="utf-8"))["traces"] if OUT.exists() else []
    versions = {name: version(name) for name in ("litgpt", "lightning", "bitsandbytes", "torch")}
    found = []
    for case in (each for each in CASES if each["name"] in known_names()):
        found.append({**traced(case, code), "versions": versions})
        print(case["name"], case["method"], found[-1]["peak_bytes"], file=sys.stderr, flush=True)
    traces = [*(each for each in kept if each["code"] != code), *found]
    OUT.write_text(json.dumps({"script": "scripts/litgpt_traces.py", "traces": traces}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
