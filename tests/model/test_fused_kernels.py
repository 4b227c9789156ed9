"""Fused kernels, loss code by age and FSDP 1 against published peaks of torch's allocator and hand arithmetic.

The peaks are those of fms-acceleration's benchmarks (refs/a100_80gb.csv and a100_80gb_liger.csv), which ran
transformers 4.45 or 4.48 with reentrant checkpointing, LoRA of rank 16 with dropout on q, k, v, o, and 4,096 tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.calibrate.priors_problem import beliefs
from tunecast.calibrate.trace.refusals import refuse_unreal
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architecture import Linear
from tunecast.model.architectures import load_architecture
from tunecast.model.factors import Curve, FactorSet
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.priors import datasheet_factors
from tunecast.model.quantized import gptq_bytes
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.time import curve_key, find_curve
from tunecast.model.units import GIB

MISTRAL, LLAMA, BIG = "mistralai/Mistral-7B-v0.1", "meta-llama/Meta-Llama-3-8B", "NousResearch/Llama-2-70b-hf"
OLD = {"method": "lora", "lora_target_modules": "q_proj,k_proj,v_proj,o_proj", "lora_dropout": 0.1, "reentrant": True,
       "max_length": 4096, "attn_implementation": "flash_attention_2", "hf_code": "4.45"}  # fmt: skip
NEWER = {**OLD, "hf_code": "4.46", "precision": "bf16"}
FAST = {"fused_kernels": "rms_norm,rope,cross_entropy"}
LIGER = {"fused_kernels": "rms_norm,rope", "loss_type": "liger"}
TWO = {"num_gpus": 2, "sharding": "fsdp", "fsdp_version": 1}

NF4 = {"method": "qlora", "precision": "bf16-autocast"}
GPTQ = {"method": "qlora", "quant_method": "gptq-4bit", "precision": "fp16-autocast"}
FULL = {"method": "full", "reentrant": True, "max_length": 4096, "attn_implementation": "flash_attention_2",
        "hf_code": "4.45", "precision": "bf16-autocast", "master_dtype": "fp32",
        "optim": "adamw_torch"}  # fmt: skip
FAST_LORA = {"fused_kernels": "rms_norm,rope,cross_entropy,lora"}
LIGER_LORA = {"fused_kernels": "rms_norm,rope,lora", "loss_type": "liger"}

PUBLISHED = [
    (MISTRAL, 8, 22.2795, {**NEWER, **NF4, **FAST_LORA}, 0.002),
    (LLAMA, 16, 37.2414, {**OLD, **NF4, **LIGER_LORA}, 0.002),
    (MISTRAL, 4, 15.2776, {**NEWER, **GPTQ}, 0.002),
    (MISTRAL, 8, 22.3077, {**NEWER, **GPTQ, **FAST_LORA}, 0.002),
    (BIG, 4, 62.4600, {**NEWER, **GPTQ, "gptq_group_size": -1}, 0.002),
    (LLAMA, 32, 69.0289, {**OLD, **GPTQ, **LIGER_LORA}, 0.002),
    (LLAMA, 8, 43.3030, {**OLD, **GPTQ, **FAST_LORA, **TWO, "num_gpus": 4}, 0.01),
    (MISTRAL, 4, 24.8706, NEWER, 0.002),
    (MISTRAL, 8, 31.9261, {**NEWER, **FAST}, 0.002),
    (LLAMA, 8, 54.9643, {**OLD, **FAST}, 0.002),
    (LLAMA, 4, 23.1955, {**OLD, **LIGER}, 0.002),
    (LLAMA, 16, 47.3961, {**OLD, **LIGER}, 0.002),
    (LLAMA, 16, 57.2285, {**OLD, **LIGER, **TWO}, 0.02),
    (LLAMA, 4, 37.4101, {**FULL, **LIGER, **TWO, "num_gpus": 4}, 0.002),
    (LLAMA, 8, 64.2224, {**FULL, **FAST, **TWO, "num_gpus": 4}, 0.01),
    (BIG, 2, 43.4791, {**NEWER, **TWO, "method": "qlora", "precision": "bf16-autocast"}, 0.02),
]


def run_of(model: str, **options: Any) -> Run:
    return resolve_run(load_architecture(model), {"allow_long_context": True, **options}).run


@pytest.mark.parametrize(("model", "batch", "peak_gib", "options", "within"), PUBLISHED)
def test_published_peaks_of_torch(
    model: str, batch: int, peak_gib: float, options: dict[str, Any], within: float
) -> None:
    run = run_of(model, **options, per_device_train_batch_size=batch)
    assert memory_timeline(load_architecture(model), run).allocated_bytes / GIB == pytest.approx(peak_gib, rel=within)


def moved(run: Run, *names: str) -> dict[str, float]:
    """Bytes by phase of operations of these names."""
    found: dict[str, float] = {}
    for op in step_operations(load_architecture(LLAMA), run):
        if op.name in names:
            found[op.phase.value] = found.get(op.phase.value, 0.0) + op.total_bytes
    return found


def test_a_fused_norm_reads_and_writes_each_row_once() -> None:
    """65 norms of 4,096 numbers in 16 bits: x and y forward; backward gradient, x and gradient."""
    run = run_of(LLAMA, **{**OLD, **FAST}, per_device_train_batch_size=1)
    row_set = 4096 * 4096 * 2
    found = moved(run, "rmsnorm")
    assert found["forward"] == pytest.approx(65 * 2 * row_set, rel=0.001)
    assert found["recompute"] == pytest.approx(64 * 2 * row_set, rel=0.001)
    assert found["backward"] == pytest.approx(65 * 3 * row_set, rel=0.001)


def test_a_fused_rotation_works_in_place() -> None:
    """32 query and 8 key heads of 128 over 4,096 tokens, read and written once; cos and sin by half."""
    run = run_of(LLAMA, **{**OLD, **FAST}, per_device_train_batch_size=1)
    heads = 4096 * 40 * 128 * 2
    found = moved(run, "rotary")
    tables = 2 * 4096 * 128 * 2
    assert found["backward"] == pytest.approx(32 * (2 * heads + tables), rel=0.001)
    assert "head_layout" not in {op.name for op in step_operations(load_architecture(LLAMA), run)}


def gemms(run: Run, name: str) -> list[Operation]:
    operations = step_operations(load_architecture(LLAMA), run)
    return [op for op in operations if op.kind is Kind.GEMM and op.name == name]


def test_liger_multiplies_with_the_head_twice_in_the_forward_and_never_again() -> None:
    run = run_of(LLAMA, max_length=2048, loss_type="liger")
    head = 2.0 * 2048 * 4096 * 128256
    found = gemms(run, "lm_head")
    assert sum(op.total_flops for op in found) == pytest.approx(2 * head)
    assert {op.phase for op in found} == {Phase.FORWARD}
    assert {op.shape for op in found} == {(64, 128256, 4096), (64, 4096, 128256)}  # 2,048 / 32 tokens a chunk


def test_gptq_weights_by_their_checkpoint_layout() -> None:
    """4,096 x 14,336 packed, 32 groups of 2-byte scales and zeros of as many bits as weights, 4 bytes per input."""
    linear = Linear(name="up_proj", in_features=4096, out_features=14336)
    four, eight, whole = (
        Run(method="qlora", quant_method=method, gptq_group_size=size)
        for method, size in (("gptq-4bit", 128), ("gptq-8bit", 128), ("gptq-4bit", -1))
    )
    assert gptq_bytes(linear, four) == 4096 * 14336 // 2 + 32 * 14336 * 2 + 32 * 14336 // 2 + 4 * 4096
    assert gptq_bytes(linear, eight) == 4096 * 14336 + 32 * 14336 * 2 + 32 * 14336 + 4 * 4096
    assert gptq_bytes(linear, whole) == 4096 * 14336 // 2 + 14336 * 2 + 14336 // 2 + 4 * 4096


def test_pytorch_unpacks_a_gptq_weight_in_five_kernels_and_keeps_it() -> None:
    """Per weight 0.5 + 4, 4 + 1, 1 + 1, 1 + 1 and 1 + 2 bytes; a layer's weights stay in fp16 for its backward."""
    triton, by_torch = (run_of(LLAMA, **GPTQ, max_length=512, gptq_kernel=kernel) for kernel in ("triton", "torch"))
    llama = load_architecture(LLAMA)
    found = [op for op in step_operations(llama, by_torch) if op.name.startswith("dequantize.")]
    weights = sum(linear.weight_params for linear in llama.groups[0].layer.linears) * llama.num_layers
    assert sum(op.total_bytes for op in found if op.phase is Phase.FORWARD) == pytest.approx(16.5 * weights, rel=0.001)
    assert sum(op.total_launches for op in found if op.phase is Phase.RECOMPUTE) == 5 * 7 * llama.num_layers
    assert not [op for op in found if op.phase is Phase.BACKWARD]
    more = memory_timeline(llama, by_torch).moments["backward"] - memory_timeline(llama, triton).moments["backward"]
    assert more > 2 * weights / llama.num_layers


def test_a_gptq_base_is_written_in_16_bits_in_every_pass() -> None:
    run = run_of(LLAMA, **GPTQ, max_length=512)
    found = [op for op in step_operations(load_architecture(LLAMA), run) if op.kind is Kind.DEQUANT]
    by_phase = {phase: sum(op.count for op in found if op.phase is phase) for phase in Phase}
    assert by_phase[Phase.FORWARD] == by_phase[Phase.RECOMPUTE] == by_phase[Phase.BACKWARD] == 32 * 7
    up = next(op for op in found if op.shape == (4096 * 14336,))
    assert up.bytes == pytest.approx((2 + 0.5 + 2.5 / 128) * 4096 * 14336, rel=0.001)


def test_fused_adapters_multiply_three_times_where_peft_does_twice_backward() -> None:
    """Per adapter and token 2 r (k + n): twice for A and B, once for x; PEFT keeps the low-rank product instead."""
    plain, fast = (
        run_of(LLAMA, **NF4, max_length=1024, lora_target_modules="o_proj", fused_kernels=parts)
        for parts in ("none", "lora")
    )
    unit = 32 * 2.0 * 1024 * 16 * (4096 + 4096)
    found = [
        sum(
            op.total_flops
            for name in ("o_proj.lora_A", "o_proj.lora_B")
            for op in gemms(run, name)
            if op.phase is Phase.BACKWARD
        )
        for run in (plain, fast)
    ]
    assert found == pytest.approx([2 * unit, 3 * unit])


def test_the_first_layer_trains_its_adapters_though_its_input_has_no_gradient() -> None:
    """Without checkpoints and with a frozen table: per adapter 4 r (k + n) a token in 32 layers, 2 r (k + n) for the
    inputs of 31, and as many base products. torch runs such a function's backward once, with every output's gradient.
    """
    run = run_of(LLAMA, method="lora", max_length=512, fused_kernels="lora", gradient_checkpointing=False)
    for name, wide in (("q_proj", 4096), ("k_proj", 1024), ("v_proj", 1024)):
        back = [sum(op.total_flops for op in gemms(run, part) if op.phase is Phase.BACKWARD)
                for part in (f"{name}.lora_A", f"{name}.lora_B", name)]  # fmt: skip
        assert back[0] + back[1] == pytest.approx((2 * 32 + 31) * 2.0 * 512 * 16 * (4096 + wide))
        assert back[2] == pytest.approx(31 * 2.0 * 512 * 4096 * wide)


def test_a_gptq_base_takes_fp16_only() -> None:
    assert run_of(LLAMA, method="qlora", quant_method="gptq-4bit").precision == "fp16-autocast"
    with pytest.raises(InputError, match="fp16"):
        run_of(LLAMA, method="qlora", quant_method="gptq-4bit", precision="bf16-autocast")


def test_cut_cross_entropy_multiplies_three_times_and_holds_no_logits() -> None:
    run, full = (run_of(LLAMA, max_length=2048, loss_type=kind) for kind in ("cut_cross_entropy", "nll"))
    found = gemms(run, "cut_cross_entropy")
    assert sum(op.total_flops for op in found) == pytest.approx(3 * 2.0 * 2048 * 4096 * 128256)
    assert sum(op.total_launches for op in found) == 2
    llama = load_architecture(LLAMA)
    saved = memory_timeline(llama, full).moments["loss"] - memory_timeline(llama, run).moments["loss"]
    assert saved > 8 * 2048 * 128256  # two fp32 copies at least
    assert memory_timeline(llama, run).parts_bytes["logits"] == 0


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        (LLAMA, {"fused_kernels": "lora", "method": "full"}, "--method is full"),
        (LLAMA, {"fused_kernels": "cross_entropy", "loss_type": "liger"}, "loss kernel of its own"),
        ("microsoft/Phi-3-mini-4k-instruct", {"fused_kernels": "swiglu"}, "no separate gate"),
    ],
)
def test_what_cannot_be_fused_is_refused(model: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotSupportedError, match=sentence):
        run_of(model, **options)


def test_a_part_that_is_none_is_named() -> None:
    with pytest.raises(InputError, match="rms_norm"):
        run_of(LLAMA, fused_kernels="gelu")


def test_8_bit_products_cast_each_operand_once_and_keep_8_bits() -> None:
    """Of a trained map: x, w and the gradient read in 2 bytes, written twice in 1; three products of 8-bit operands."""
    llama = load_architecture(LLAMA)
    plain, small = (run_of(LLAMA, method="full", max_length=1024, fp8=kind) for kind in ("none", "te"))
    operations = step_operations(llama, small)
    products = [op for op in operations if op.kind is Kind.GEMM and op.dtype == "fp8"]
    layers = sum(linear.weight_params for linear in llama.groups[0].layer.linears) * llama.num_layers
    assert sum(op.total_flops for op in products if op.phase is Phase.BACKWARD) == pytest.approx(4 * 1024 * layers)
    weights = [op for op in operations if op.name == "fp8_weight_cast" and op.phase is Phase.FORWARD]
    assert sum(op.total_bytes for op in weights) == pytest.approx((2 + 1) * layers, rel=0.001)  # no gradient yet
    again = [op for op in operations if op.name == "fp8_weight_cast" and op.phase is Phase.RECOMPUTE]
    assert sum(op.total_bytes for op in again) == pytest.approx((2 + 1 + 1) * layers, rel=0.001)
    assert memory_timeline(llama, small).at_rest_bytes == memory_timeline(llama, plain).at_rest_bytes


def test_megatron_casts_weights_once_a_step() -> None:
    run = run_of(LLAMA, method="full", max_length=512, fp8="megatron", gradient_accumulation_steps=4)
    casts = [op for op in step_operations(load_architecture(LLAMA), run) if op.name == "fp8_weight_cast"]
    assert sum(op.count for op in casts if op.phase is Phase.FORWARD) == 32 * 7


@pytest.mark.parametrize(
    ("kind", "passes", "written"),
    [("megatron", 1, 2.0), ("megatron-current", 2, 2.0), ("megatron-mxfp8", 1, 2 * 33 / 32), ("torchao", 2, 1.0)],
)
def test_recipes_read_for_maxima_write_scales_and_share_inputs(kind: str, passes: int, written: float) -> None:
    """Of a layer's four inputs (of q,k,v; o; gate,up; down), 3 x 4,096 and 14,336 wide, one cast each."""
    run = run_of(LLAMA, method="full", max_length=512, fp8=kind, gradient_checkpointing=False)
    casts = [op for op in step_operations(load_architecture(LLAMA), run) if op.phase is Phase.FORWARD]
    elements = 32 * 512 * (3 * 4096 + 14336)
    small = [op for op in casts if op.name == "fp8_cast"]
    assert sum(op.count for op in small) == 32 * 4
    assert sum(op.total_bytes for op in small) == pytest.approx((2 + written) * elements)
    maxima = sum(op.count for op in casts if op.name == "fp8_maximum")
    assert maxima == (passes - 1) * 32 * (4 + 7)


SMALL_WEIGHTS = {"fp8": "megatron", "fp8_weights": True, "max_length": 512, "gradient_accumulation_steps": 3}


def weights_of_layers() -> int:
    llama = load_architecture(LLAMA)
    return llama.num_layers * sum(linear.weight_params for linear in llama.groups[0].layer.linears)


def test_frozen_weights_in_8_bits_take_a_byte_and_are_transposed_in_every_backward() -> None:
    llama = load_architecture(LLAMA)
    plain, small = (run_of(LLAMA, method="lora", **{**SMALL_WEIGHTS, "fp8_weights": kept}) for kept in (False, True))
    saved = memory_timeline(llama, plain).at_rest_bytes - memory_timeline(llama, small).at_rest_bytes
    assert saved == weights_of_layers()
    operations = step_operations(llama, small)
    assert not [op for op in operations if op.name == "fp8_weight_cast"]
    turned = [op for op in operations if op.name == "fp8_weight_transpose"]
    assert {op.phase for op in turned} == {Phase.BACKWARD}
    assert sum(op.total_bytes for op in turned) == 3 * 2 * weights_of_layers()
    same = [[op for op in step_operations(llama, run) if op.kind is Kind.GEMM] for run in (plain, small)]
    assert same[0] == same[1]


def test_trained_weights_in_8_bits_are_transposed_once_a_step_and_gathered_in_half_the_bytes() -> None:
    joined = load_architecture(LLAMA)
    options = {**SMALL_WEIGHTS, "method": "full", "num_gpus": 8, "tp": 2, "sharding": "zero1"}
    plain, small = (run_of(LLAMA, **{**options, "fp8_weights": kept}) for kept in (False, True))
    before, after = (step_operations(joined, run) for run in (plain, small))
    turned = sum(op.total_bytes for op in after if op.name == "fp8_weight_transpose")
    assert turned == pytest.approx(2 * weights_of_layers() / 2)  # half of each map on each of two GPUs
    gathered = [sum(op.total_bytes for op in found if op.name == "all_gather") for found in (before, after)]
    tables = 2 * 2 * joined.embedding_params / 2  # table and head, not tied, in two bytes, split in two
    assert gathered[0] / 2 < gathered[1] < gathered[0] / 2 + tables
    assert sum(op.total_bytes for op in before if op.name == "reduce_scatter") == sum(
        op.total_bytes for op in after if op.name == "reduce_scatter"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fp8": "none"}, "add --fp8 megatron"),
        ({"fp8": "torchao"}, "with --fp8 torchao is not built"),
        ({"fp8": "megatron-mxfp8"}, "with --fp8 megatron-mxfp8 is not built"),
        ({"fp8": "megatron", "num_gpus": 8, "sharding": "fsdp"}, "with --sharding fsdp is not built"),
        ({"fp8": "megatron", "method": "full"}, "fp32 copies of Megatron's distributed optimizer"),
    ],
)
def test_weights_in_8_bits_are_refused_where_nobody_stores_them(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run_of(LLAMA, fp8_weights=True, **options)


def test_8_bit_products_need_16_bit_weights() -> None:
    with pytest.raises(InputError, match="quantized"):
        run_of(LLAMA, method="qlora", fp8="te")


def test_an_8_bit_base_makes_non_reentrant_checkpoints_keep_every_input() -> None:
    """bitsandbytes holds a map's input beside autograd: four inputs per layer stay, 3 x 4,096 and 14,336 wide."""
    llama = load_architecture(LLAMA)
    int8 = {"method": "qlora", "quant_method": "bnb-8bit", "max_length": 4096}
    free, kept = (memory_timeline(llama, run_of(LLAMA, **int8, reentrant=kind)) for kind in (True, False))
    inputs = 32 * 4096 * (3 * 4096 + 14336) * 2
    assert kept.moments["loss"] - free.moments["loss"] == pytest.approx(inputs, rel=0.01)


def test_native_attention_is_the_same_work_on_a_curve_of_its_own() -> None:
    """On a Hopper card at the datasheet's whole rate, where FlashAttention-2 reaches a share of it; elsewhere alike."""
    plain, native = (run_of(LLAMA, method="lora", max_length=4096, fused_kernels=f) for f in ("none", "attention"))
    llama = load_architecture(LLAMA)
    totals, times = [], {}
    for run in (plain, native):
        operations = [op for op in step_operations(llama, run) if op.kind is Kind.ATTENTION]
        totals.append((sum(op.total_flops for op in operations), sum(op.total_launches for op in operations)))
        for gpu in ("h100-sxm5-80gb", "a100-sxm4-80gb"):
            curves = datasheet_factors(load_gpus()[gpu], beliefs()).curves
            factors = FactorSet(gpu=gpu, curves=curves, factors={}, step_log_sd=0.0)
            (rate,) = {find_curve(curve_key(op), factors).params["flops_per_s"] for op in operations}
            times[gpu, run.fuses("attention")] = rate
    assert totals[0] == totals[1]
    share = float(beliefs()["attention_on_newer"]["values"]["9"])
    assert times["h100-sxm5-80gb", False] == pytest.approx(share * times["h100-sxm5-80gb", True], rel=1e-3)
    assert times["a100-sxm4-80gb", False] == pytest.approx(times["a100-sxm4-80gb", True], rel=1e-3)


def test_a_card_without_8_bit_products_is_named() -> None:
    factors = datasheet_factors(load_gpus()["a100-sxm4-80gb"], beliefs())
    (product,) = {op for op in step_operations(load_architecture(LLAMA), run_of(LLAMA, fp8="te")) if op.dtype == "fp8"
                  and op.name == "q_proj" and op.phase is Phase.FORWARD}  # fmt: skip
    with pytest.raises(InputError, match="a100-sxm4-80gb has no rate for products of 8-bit floats"):
        find_curve(curve_key(product), factors)


def test_a_record_without_native_attention_lends_the_other_curve() -> None:
    curve = Curve(form="attention", params={"flops_per_s": 1.0}, log_sd=0.0, origin="measured")
    factors = FactorSet(gpu="x", curves={"attention.bf16.forward": curve}, factors={}, step_log_sd=0.0)
    assert find_curve("attention-native.bf16.backward", factors) is curve


@pytest.mark.parametrize("options", [{"fused_kernels": "rope"}, {"loss_type": "liger"}, {"fp8": "te"}, GPTQ])
def test_what_has_formulas_only_is_not_traced_in_silence(options: dict[str, Any]) -> None:
    with pytest.raises(NotSupportedError, match="formulas only"):
        refuse_unreal(run_of(LLAMA, **options), device="meta")


def test_unsloths_stack_offloads_checkpoints_and_holds_less_than_plain_peft() -> None:
    """Unless checkpointing is switched off, and then nothing is offloaded."""
    llama = load_architecture(LLAMA)
    plain, fast = (run_of(LLAMA, method="qlora", max_length=2048, stack=stack) for stack in ("hf-peft", "unsloth"))
    assert fast.activation_offloading
    assert fast.fused_kernels == ("rms_norm", "rope", "swiglu", "lora")
    assert memory_timeline(llama, fast).allocated_bytes < memory_timeline(llama, plain).allocated_bytes
    moved = [
        sum(op.total_bytes for op in step_operations(llama, run) if op.kind in (Kind.MEMORY, Kind.LOSS))
        for run in (plain, fast)
    ]
    assert moved[1] < 0.7 * moved[0]
    assert not run_of(LLAMA, method="qlora", stack="unsloth", gradient_checkpointing=False).activation_offloading


def test_torchtunes_stack_is_in_16_bits_throughout() -> None:
    run = run_of(LLAMA, method="lora", stack="torchtune")
    assert (run.precision, run.dtype, run.adapter_dtype, run.optim) == ("bf16", "bf16", "bf16", "adamw_torch_fused")


def test_unsloth_calls_flash_attention_itself() -> None:
    """transformers reads in every layer whether one sample's positions restart, and the host waits for it each time;
    Unsloth calls ``flash_attn_func`` (``unsloth/utils/attention_dispatch.py``)."""
    found = {}
    for stack in ("hf-peft", "unsloth"):
        run = run_of(LLAMA, method="lora", stack=stack, attn_implementation="flash_attention_2")
        looked = [each for each in step_operations(load_architecture(LLAMA), run) if each.name == "packing.bool"]
        found[stack] = sum(each.count for each in looked)
    assert found == {"hf-peft": 2 * 32, "unsloth": 0}
