"""Every benchmark really runs on this CPU at tiny sizes, and its arithmetic is the one it names."""

import math

import pytest

from tunecast.calibrate.devices.protocol import TrialResult, TrialSpec

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from tunecast.calibrate.bench import run_bench  # noqa: E402
from tunecast.calibrate.bench.math_ops import prepare_attention, prepare_gemm, prepare_matmul_4bit  # noqa: E402
from tunecast.calibrate.bench.memory_ops import prepare_memory, prepare_optimizer  # noqa: E402
from tunecast.calibrate.bench.tensors import random_4bit  # noqa: E402
from tunecast.calibrate.devices.cpu import CpuBackend  # noqa: E402
from tunecast.catalogs.errors import InputError  # noqa: E402

NF4 = {"quant_type": "nf4", "double_quant": True, "dtype": "bf16"}
HEADS = {"batch": 1, "heads": 4, "kv_heads": 2, "length": 16, "head_dim": 8, "dtype": "bf16"}
EVERY_BENCH = [
    ("gemm", {"m": 8, "n": 16, "k": 32, "dtype": "bf16", "layout": "nt"}),
    ("gemm", {"m": 8, "n": 16, "k": 32, "dtype": "fp32", "layout": "nn"}),
    ("gemm", {"m": 8, "n": 16, "k": 32, "dtype": "fp16", "layout": "tn"}),
    *[("memory", {"op": op, "bytes": 4096, "dtype": "fp32"}) for op in ("copy", "read", "write", "add")],
    ("dequant", {"elements": 8192, "rows": 64, "cols": 128, **NF4}),
    ("dequant", {"elements": 8192, "rows": 64, "cols": 128, **NF4, "double_quant": False, "quant_type": "fp4"}),
    *[("matmul_4bit", {"m": 4, "n": 64, "k": 128, "pass": way, **NF4}) for way in ("forward", "backward")],
    *[("attention", {**HEADS, "pass": way}) for way in ("forward", "backward")],
    ("loss", {"tokens": 8, "vocab": 100, "dtype": "bf16"}),
    *[("optimizer", {"elements": 1000, "tensors": 4, "optim": o}) for o in ("adamw_torch", "adamw_torch_fused")],
    ("launch", {"kernels": 20}),
    ("sync", {}),
    *[
        ("disk", {"bytes": 65536, "cold": cold, "direction": way})
        for cold in (True, False)
        for way in ("read", "write")
    ],
    *[("load", {"bytes": 65536, "quantize": quantize}) for quantize in (True, False)],
    ("checkpoint", {"bytes": 65536}),
]


@pytest.fixture
def backend():
    made = CpuBackend()
    made.l2_bytes = 4096
    return made


def spec(bench, params, repeats=2, warmup=1):
    return TrialSpec(bench=bench, params=params, repeats=repeats, warmup=warmup)


@pytest.mark.parametrize(("bench", "params"), EVERY_BENCH, ids=lambda value: str(value)[:60])
def test_gives_samples_and_warmups(backend, bench, params):
    result = run_bench(spec(bench, params), backend)
    assert result.outcome == "ok"
    assert (len(result.samples_s), len(result.warmup_s)) == (2, 1)
    assert all(math.isfinite(sample) and sample > 0 for sample in result.samples_s)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_gemm_multiplies_m_by_k_with_k_by_n(backend, layout):
    prepared = prepare_gemm({"m": 3, "n": 5, "k": 7, "dtype": "fp32", "layout": layout}, backend)
    assert prepared.calls[0]().shape == (3, 5)


def test_gemm_refuses_an_unknown_layout(backend):
    with pytest.raises(InputError, match="nt, nn and tn"):
        prepare_gemm({"m": 3, "n": 5, "k": 7, "dtype": "fp32", "layout": "tt"}, backend)


TOUCHED = ("first", "second", "out")
"""Names of the tensors in the calls of the memory bench."""


@pytest.mark.parametrize(("op", "tensors"), [("copy", 2), ("read", 1), ("write", 1), ("add", 3)])
def test_memory_moves_the_bytes_it_names(backend, op, tensors):
    prepared = prepare_memory({"op": op, "bytes": 12000, "dtype": "bf16"}, backend)
    names, cells = prepared.calls[0].__code__.co_freevars, prepared.calls[0].__closure__
    touched = [cell.cell_contents for name, cell in zip(names, cells, strict=True) if name in TOUCHED]
    assert sum(tensor.numel() * tensor.element_size() for tensor in touched) == 12000
    assert len(touched) == tensors
    result = prepared.calls[0]()
    if op == "read":
        torch.testing.assert_close(result, touched[0].sum())


def test_memory_refuses_an_unknown_operation(backend):
    with pytest.raises(InputError, match="copy, read, write, add"):
        prepare_memory({"op": "scale", "bytes": 12000, "dtype": "bf16"}, backend)


def test_attention_is_causal_and_grouped(backend):
    prepared = prepare_attention({**HEADS, "dtype": "fp32", "pass": "forward"}, backend)
    call = prepared.calls[0]
    names = dict(zip(call.__code__.co_freevars, (cell.cell_contents for cell in call.__closure__), strict=True))
    query, key, value = names["query"], names["key"], names["value"]
    scores = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) / math.sqrt(HEADS["head_dim"])
    masked = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
    expected = masked.softmax(-1) @ value.repeat_interleave(2, dim=1)
    torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4)


def test_matmul_4bit_is_the_product_with_the_dequantized_weight(backend):
    from bitsandbytes.functional import dequantize_4bit

    packed, state = random_4bit(64, 128, quant_type="nf4", double_quant=True, device="cpu", dtype="bf16")
    weight = dequantize_4bit(packed, state)
    assert weight.shape == (64, 128)
    rows = torch.randn(4, 128, dtype=torch.bfloat16)
    import bitsandbytes

    product = bitsandbytes.matmul_4bit(rows, packed, quant_state=state)
    torch.testing.assert_close(product.float(), rows.float() @ weight.float().t(), rtol=0.05, atol=0.05)


def test_random_4bit_weights_look_like_quantized_normal_ones():
    """Same bytes, same kinds of statistics, and a spread near 0.02, against bitsandbytes' own quantizer."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    generator = torch.Generator().manual_seed(1)
    real = (torch.randn(512, 1024, generator=generator) * 0.02).bfloat16()
    real_packed, real_state = quantize_4bit(real, quant_type="nf4", compress_statistics=True)
    packed, state = random_4bit(512, 1024, quant_type="nf4", double_quant=True, device="cpu", dtype="bf16")
    assert (packed.shape, packed.dtype) == (real_packed.shape, real_packed.dtype)
    assert (state.absmax.shape, state.absmax.dtype) == (real_state.absmax.shape, real_state.absmax.dtype)
    assert (state.state2.absmax.shape, state.state2.blocksize) == (real_state.state2.absmax.shape, 256)
    assert (state.blocksize, state.nested, state.code.tolist()) == (
        real_state.blocksize,
        True,
        real_state.code.tolist(),
    )
    made = dequantize_4bit(packed, state).float()
    assert made.std().item() == pytest.approx(real.float().std().item(), rel=0.5)


@pytest.mark.parametrize(("way", "shape"), [("forward", (4, 64)), ("backward", (4, 128))])
def test_matmul_4bit_backward_is_the_input_gradient(backend, way, shape):
    prepared = prepare_matmul_4bit({"m": 4, "n": 64, "k": 128, "pass": way, **NF4}, backend)
    result = prepared.calls[0]()
    assert (result if way == "forward" else result[0]).shape == shape


def test_optimizer_updates_every_tensor(backend):
    prepared = prepare_optimizer({"elements": 100, "tensors": 4, "optim": "adamw_torch"}, backend)
    optimizer = prepared.calls[0].__self__
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    before = [weight.detach().clone() for weight in weights]
    prepared.calls[0]()
    assert [weight.numel() for weight in weights] == [25] * 4
    assert all(not torch.equal(old, new) for old, new in zip(before, weights, strict=True))


def test_out_of_memory_is_an_outcome(backend):
    result = run_bench(spec("memory", {"op": "copy", "bytes": 1 << 60, "dtype": "bf16"}), backend)
    assert result.outcome == "oom"
    assert "memory" in result.message


def test_other_failures_go_up(backend):
    with pytest.raises(KeyError):
        run_bench(spec("gemm", {"m": 3}), backend)


def test_results_are_of_the_protocols_type(backend):
    assert isinstance(run_bench(spec("sync", {}), backend), TrialResult)
