"""accelerate YAML and DeepSpeed JSON beside a training file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architectures import load_architecture
from tunecast.model.configs import RunFile, merge_options, read_config
from tunecast.model.configs.frameworks import load_frameworks
from tunecast.model.largest import changed
from tunecast.model.memory import memory_timeline
from tunecast.model.num_gpus import ways_for, with_count
from tunecast.model.on_device import resolve_for
from tunecast.model.plans import _Line, line_options, lines
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE, Question
from tunecast.model.resolve import resolve_run
from tunecast.model.target import resolve_targets

Read = Callable[..., RunFile]


def accelerate(kind: str, **more: Any) -> dict[str, Any]:
    return {"distributed_type": kind, "num_processes": 8, **more}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


@pytest.mark.parametrize(
    ("mapping", "gpus", "sharding"),
    [
        (accelerate("NO"), 1, None),
        (accelerate("MULTI_GPU"), 8, "ddp"),
        (accelerate("FSDP"), 8, "fsdp"),
        (accelerate("FSDP", fsdp_config={"fsdp_sharding_strategy": "FULL_SHARD"}), 8, "fsdp"),
        (accelerate("FSDP", fsdp_config={"fsdp_sharding_strategy": 1}), 8, "fsdp"),
        (accelerate("FSDP", fsdp_config={"fsdp_sharding_strategy": "NO_SHARD"}), 8, "ddp"),
        (accelerate("FSDP", fsdp_config={"fsdp_sharding_strategy": "HYBRID_SHARD"}), 8, "hsdp"),
        (accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 3}), 8, "zero3"),
    ],
)
def test_accelerate_says_how_many_gpus_and_how_they_share(
    read: Read, mapping: dict[str, Any], gpus: int, sharding: str | None
) -> None:
    options = read("llama-factory", accelerate=mapping).options
    assert (options["num_gpus"], options.get("sharding")) == (gpus, sharding)


def test_deepspeed_stage_from_its_own_file(read: Read) -> None:
    run_file = read("llama-factory", accelerate=accelerate("DEEPSPEED"), deepspeed=zero(2))
    assert (run_file.options["num_gpus"], run_file.options["sharding"]) == (8, "zero2")
    with pytest.raises(InputError, match="DEEPSPEED without a stage; add its JSON with --deepspeed"):
        read("llama-factory", accelerate=accelerate("DEEPSPEED"))


@pytest.mark.parametrize(
    ("form", "lines", "stated", "precision"),
    [
        ("llama-factory", "bf16: false", "bf16", "bf16-autocast"),
        ("llama-factory", "bf16: false\nfinetuning_type: full", "bf16", "bf16-autocast"),
        ("llama-factory", "bf16: false", "fp16", "fp16-autocast"),
        ("llama-factory", "bf16: false", "no", "bf16"),
        ("llama-factory", "bf16: false\npure_bf16: true", "bf16", "bf16"),
        ("llama-factory", "", "fp16", "bf16-autocast"),
        ("trl", "bf16: false\ndtype: float32", "bf16", "bf16-autocast"),
        ("trl", "fp16: true\nbf16: false", "bf16", "fp16-autocast"),
        ("axolotl", "bf16: false\nfp16: false", "bf16", "fp32"),
    ],
)
def test_the_launchers_precision_is_taken_where_the_trainers_file_has_none(
    read: Read, form: str, lines: str, stated: str, precision: str
) -> None:
    """``TrainingArguments`` read ACCELERATE_MIXED_PRECISION and let their own fp16 and bf16 replace it."""
    found = read(form, lines, accelerate=accelerate("MULTI_GPU", mixed_precision=stated))
    assert found.options["precision"] == precision
    contradicted = precision.endswith("-autocast") and stated not in ("no", precision.removesuffix("-autocast"))
    assert any("what the Trainer takes" in note for note in found.notes) is contradicted


def test_the_trainer_still_takes_it_so() -> None:
    """The same of transformers itself, with the variable that `accelerate launch` sets."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        assert transformers.TrainingArguments(output_dir="x", use_cpu=True).mixed_precision == "bf16"
        assert transformers.TrainingArguments(output_dir="x", use_cpu=True, fp16=True).mixed_precision == "fp16"


def test_two_files_that_disagree_are_refused_with_both_names(read: Read) -> None:
    with pytest.raises(InputError, match=r"means fsdp, but deepspeed: zero_optimization.stage means zero2"):
        read("llama-factory", accelerate=accelerate("FSDP"), deepspeed=zero(2))


@pytest.mark.parametrize(
    ("more", "expected"),
    [({"offload_optimizer": {"device": "cpu"}}, "optimizer"), ({"offload_optimizer": {"device": "nvme"}}, "nvme")],
)
def test_offloading_reaches_the_resolver(read: Read, more: dict[str, Any], expected: str) -> None:
    assert read("llama-factory", deepspeed=zero(3, **more)).options["offload"] == expected


def test_gradients_and_states_alone_under_fsdp(read: Read) -> None:
    strategy = {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}
    found = read("llama-factory", accelerate=accelerate("FSDP", fsdp_config=strategy))
    assert found.options["sharding"] == "fsdp-grad-op"


def test_no_offloading_is_no_option(read: Read) -> None:
    assert "offload" not in read("llama-factory", deepspeed=zero(3, offload_param={"device": "none"})).options


def test_batch_sizes_are_auto_or_agree(read: Read) -> None:
    auto = zero(2) | {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    lines = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 8"
    assert read("llama-factory", lines, deepspeed=auto).options["per_device_train_batch_size"] == 2
    same = zero(2) | {"train_micro_batch_size_per_gpu": 2}
    assert read("llama-factory", lines, deepspeed=same).options["per_device_train_batch_size"] == 2
    other = zero(2) | {"gradient_accumulation_steps": 4}
    with pytest.raises(InputError, match=r"is 4, but gradient_accumulation_steps of the training file is 8"):
        read("llama-factory", lines, deepspeed=other)


@pytest.mark.parametrize(
    ("companion", "named"),
    [
        ({"accelerate": accelerate("MEGATRON_LM")}, "distributed_type: MEGATRON_LM"),
        ({"accelerate": accelerate("MULTI_GPU", mixed_precision="fp8")}, "mixed_precision: fp8"),
        ({"accelerate": accelerate("MULTI_GPU", dynamo_config={"dynamo_backend": "INDUCTOR"})}, "INDUCTOR"),
        ({"accelerate": accelerate("MULTI_GPU", dynamo_backend="INDUCTOR")}, "dynamo_backend: INDUCTOR"),
        (
            {"accelerate": accelerate("FSDP", fsdp_config={"fsdp_auto_wrap_policy": "NO_WRAP"})},
            "fsdp_auto_wrap_policy: NO_WRAP asks for units of FSDP that are no layers",
        ),
        (
            {
                "accelerate": accelerate(
                    "FSDP", fsdp_config={"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 10**8}
                )
            },
            "SIZE_BASED_WRAP",
        ),
        (
            {"accelerate": accelerate("FSDP", fsdp_config={"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"})},
            "HYBRID_SHARD_ZERO2",
        ),
        (
            {"accelerate": accelerate("FSDP", fsdp_config={"fsdp_reshard_after_forward": "HYBRID_SHARD_ZERO2"})},
            "HYBRID_SHARD_ZERO2",
        ),
        ({"deepspeed": zero(3, zero_quantized_weights=True)}, "zero_quantized_weights: True"),
        ({"deepspeed": zero(2) | {"optimizer": {"type": "Lamb"}}}, "optimizer.type: Lamb"),
    ],
)
def test_what_is_not_forecast_is_refused_by_field_and_value(read: Read, companion: dict[str, Any], named: str) -> None:
    with pytest.raises(NotSupportedError) as refusal:
        read("llama-factory", **companion)
    assert named in str(refusal.value)


def test_fsdp_keeps_trained_weights_in_fp32_and_gathers_16_bits(read: Read) -> None:
    """``fsdp2_prepare_model`` of accelerate 1.12 raises the shards when mixed precision is on (``model.to(float32)``);
    its mixed precision policy gathers them in 16 bits, so that autocast finds nothing to cast."""
    full = read("trl", "use_peft: false", accelerate=accelerate("FSDP"))
    assert (full.options["dtype"], full.options["master_dtype"], full.origins["dtype"]) == (
        "bf16",
        "fp32",
        "stack-default",
    )
    assert "master_dtype" not in read("trl", accelerate=accelerate("FSDP")).options
    pure = read("llama-factory", "finetuning_type: full\npure_bf16: true", accelerate=accelerate("FSDP"))
    assert pure.options["dtype"] == "bf16"
    assert "master_dtype" not in pure.options
    assert not any("LLaMA-Factory trains fp32" in note for note in full.notes)


def test_a_sharded_model_holds_no_16_bit_copy_of_all_weights(read: Read) -> None:
    """A 70B on 32 GPUs: 4 bytes of weight, 4 of gradient and 8 of AdamW's states, each a 32nd, and one layer gathered
    beside; a copy of all in bf16 were 131 GiB more."""
    lines = "use_peft: false\nper_device_train_batch_size: 1"
    found = read("trl", lines, accelerate=accelerate("FSDP") | {"num_processes": 32})
    options = {name: value for name, value in found.options.items() if name not in RUN_OPTIONS_ELSEWHERE}
    llama = load_architecture("meta-llama/Llama-3.1-70B")
    peak = memory_timeline(llama, resolve_run(llama, options).run).allocated_bytes
    assert 16 * llama.total_params / 32 < peak < 16 * llama.total_params / 32 + 0.15 * 2 * llama.total_params


@pytest.mark.parametrize(
    ("version", "value", "sharding"),
    [
        (2, True, "fsdp"),
        (2, False, "fsdp-grad-op"),
        (1, "FULL_SHARD", "fsdp"),
        (1, "SHARD_GRAD_OP", "fsdp-grad-op"),
        (1, "NO_SHARD", "ddp"),
        (1, "HYBRID_SHARD", "hsdp"),
    ],
)
def test_whether_weights_stay_gathered_is_read(read: Read, version: int, value: Any, sharding: str) -> None:
    """accelerate 1.12 utils/dataclasses.py (``FullyShardedDataParallelPlugin.__post_init__``): of FSDP 2 a truth
    value, of FSDP 1 the name of a strategy. Shards of trained weights are fp32 whatever stays gathered."""
    config = {"fsdp_version": version, "fsdp_reshard_after_forward": value}
    machine = accelerate("FSDP", fsdp_config=config) | {"num_processes": 16, "num_machines": 2}
    found = read("trl", "use_peft: false", accelerate=machine).options
    assert found["sharding"] == sharding
    assert found.get("master_dtype") == (None if sharding == "ddp" else "fp32")


FSDP_2 = "\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}"
FSDP_1 = "\nfsdp: [full_shard]\nfsdp_config: {offload_params: false}"


@pytest.mark.parametrize(("lines", "master", "version"), [(FSDP_2, "none", 2), (FSDP_1, "fp32", 1)])
def test_axolotl_shards_what_it_loaded_under_fsdp2(read: Read, lines: str, master: str, version: int) -> None:
    """axolotl 0.19 puts its own ``fsdp2_prepare_model`` in accelerate's place, without the fp32
    (``monkeypatch/accelerate/fsdp2.py``); FSDP 1, its default (``_resolve_fsdp_version``), is accelerate's."""
    found = read("axolotl", "adapter:\nlora_r:\nlora_target_linear:\nlora_mlp_kernel:" + lines)
    assert (found.options["dtype"], found.options.get("master_dtype")) == ("bf16", master)
    assert found.options["fsdp_version"] == version
    assert any("accelerate raises" in note for note in found.notes) == (master == "fp32")


@pytest.mark.parametrize("typed", [{}, {"dtype": "bf16"}, {"precision": "bf16-autocast"}, {"method": "lora"}])
def test_what_axolotl_does_not_raise_no_typed_dtype_raises(read: Read, typed: dict[str, Any]) -> None:
    found = read("axolotl", "adapter:\nlora_r:\nlora_target_linear:\nlora_mlp_kernel:" + FSDP_2)
    options = merge_options(found, {"num_gpus": 8, **typed}).options
    run = resolve_run(
        load_architecture("meta-llama/Llama-3.1-8B"),
        {name: value for name, value in options.items() if name not in RUN_OPTIONS_ELSEWHERE},
    ).run
    assert (run.sharding, run.master_dtype) == ("fsdp", None)


@pytest.mark.parametrize(
    ("typed", "dtype", "master"),
    [
        ({}, "bf16", "fp32"),
        ({"num_gpus": 1}, "fp32", None),
        ({"sharding": "ddp"}, "fp32", None),
        ({"sharding": "fsdp-grad-op"}, "bf16", "fp32"),
        ({"dtype": "fp32"}, "fp32", None),
        ({"method": "lora"}, "fp32", None),
    ],
)
def test_a_command_line_that_takes_fsdp_away_takes_its_shards(
    read: Read, typed: dict[str, Any], dtype: str, master: str | None
) -> None:
    found = read("trl", "dtype:\nuse_peft: false", accelerate=accelerate("FSDP"))
    merged = merge_options(found, typed)
    assert (merged.options["dtype"], merged.options.get("master_dtype")) == (dtype, master)
    assert any("accelerate raises" in note for note in merged.notes) == (master is not None)


@pytest.mark.parametrize(("lines", "own"), [("dtype:", "fp32"), ("dtype: bfloat16", "bf16")])
@pytest.mark.parametrize("file", ["with FSDP", "without"])
def test_plans_have_the_dtypes_that_the_file_has_with_their_sharding(
    read: Read, file: str, lines: str, own: str
) -> None:
    """TRL loads fp32 where a file names no dtype; accelerate's FSDP keeps fp32 in shards whatever was loaded."""
    companion = {"accelerate": accelerate("FSDP")} if file == "with FSDP" else {}
    found = merge_options(read("trl", f"{lines}\nuse_peft: false", **companion), {}).options
    for sharding, method, dtype, master in (
        ("fsdp", "full", "bf16", "fp32"),
        ("fsdp-grad-op", "full", "bf16", "fp32"),
        ("ddp", "full", own, None),
        *([("fsdp", "lora", own, None)] if file == "with FSDP" else []),
    ):
        line = _Line(method=method, num_gpus=8, sharding=sharding, checkpointing=True)
        plan = line_options(found, line, 1, 8)
        assert (plan["dtype"], plan.get("master_dtype")) == (dtype, master)


@pytest.mark.parametrize("model", ["Llama-3.2-1B", "Llama-3.1-70B"])
def test_a_file_that_asks_for_no_sharding_trains_copies(read: Read, model: str) -> None:
    """So it is launched, whether they fit or not; a sharding that is proposed has the file's dtypes with it."""
    found = read("trl", "dtype: bfloat16\nuse_peft: false\nper_device_train_batch_size: 1")
    options = merge_options(found, {"num_gpus": 8}).options
    (card,) = resolve_targets(["a100-sxm4-80gb"], {})
    question = Question(architecture=load_architecture(f"meta-llama/{model}"), options=options)
    found_run = resolve_for(question, card)
    assert (found_run.run.sharding, found_run.run.dtype, found_run.run.master_dtype) == ("ddp", "bf16", None)
    assert "--sharding not given: ddp, since the file asks for none" in found_run.notes
    proposed = resolve_for(changed(question, {"sharding": "fsdp"}), card).run
    assert (proposed.sharding, proposed.dtype, proposed.master_dtype) == ("fsdp", "bf16", "fp32")


@pytest.mark.parametrize("files", [{}, {"deepspeed": zero(2)}, {"accelerate": accelerate("FSDP")}])
@pytest.mark.parametrize(
    ("sharding", "dtype", "precision", "master"),
    [
        ("zero2", "bf16", "bf16", None),
        ("ddp", "fp32", "bf16-autocast", None),
        ("fsdp", "bf16", "bf16-autocast", "fp32"),
    ],
)
def test_a_sharding_has_its_dtypes_whatever_the_file_shards(
    read: Read, files: dict[str, Any], sharding: str, dtype: str, precision: str, master: str | None
) -> None:
    """DeepSpeed casts the module, FSDP keeps fp32 in shards, and DDP trains the fp32 that TRL loads under autocast."""
    found = read("trl", "dtype:\nuse_peft: false", **files)
    merged = merge_options(found, {"sharding": sharding, "num_gpus": 8})
    told = tuple(merged.options.get(name) for name in ("dtype", "precision", "master_dtype"))
    assert told == (dtype, precision, master)
    line = _Line(method="full", num_gpus=8, sharding=sharding, checkpointing=True)
    plan = line_options(merge_options(found, {"num_gpus": 8}).options, line, 1, 8)
    assert tuple(plan.get(name) for name in ("dtype", "precision", "master_dtype")) == told
    assert any("DeepSpeed trains in pure" in note for note in merged.notes) == (sharding == "zero2")
    assert any("accelerate raises" in note for note in merged.notes) == (sharding == "fsdp")


ADAPTERS = ("dtype", "precision", "adapter_dtype")
CAST = {"dtype": "bf16", "precision": "bf16", "adapter_dtype": "bf16"}
OWN = {"dtype": "bf16", "precision": "bf16-autocast", "adapter_dtype": None}


@pytest.mark.parametrize(
    ("files", "typed", "expected"),
    [
        ({}, {"adapter_dtype": "bf16"}, {**OWN, "adapter_dtype": "bf16"}),
        ({"deepspeed": zero(2)}, {}, CAST),
        ({"deepspeed": zero(2)}, {"sharding": "ddp", "dtype": "bf16"}, OWN),
        ({"deepspeed": zero(2)}, {"sharding": "ddp", "dtype": "fp32"}, {**OWN, "dtype": "fp32"}),
        ({}, {"sharding": "zero2", "dtype": "bf16"}, CAST),
        ({}, {"sharding": "zero2", "dtype": "bfloat16"}, {**CAST, "dtype": "bfloat16"}),
        ({}, {"sharding": "zero2", "dtype": "fp32"}, {**OWN, "dtype": "fp32"}),
        ({"deepspeed": zero(2)}, {"adapter_dtype": "fp32"}, {**CAST, "adapter_dtype": "fp32"}),
    ],
)
def test_typed_dtypes_stand_among_those_of_the_sharding(
    read: Read, files: dict[str, Any], typed: dict[str, Any], expected: dict[str, str]
) -> None:
    """DeepSpeed's cast is left out where another dtype than its own is typed, and nowhere else; the rest is as the
    file has it with the sharding that runs, in plans of several GPUs too."""
    found = merge_options(read("llama-factory", **files), {"num_gpus": 2, **typed}).options
    assert {name: found.get(name) for name in ADAPTERS} == expected
    sharding = found.get("sharding") or "ddp"
    plan = line_options(found, _Line(method="lora", num_gpus=2, sharding=sharding, checkpointing=True), 1, 2)
    assert {name: plan.get(name) for name in ADAPTERS} == expected


def searched(model: str, run_file: RunFile) -> Question:
    """A question whose number of GPUs is searched, as `tunecast.asking` asks it."""
    return Question(
        architecture=load_architecture(model),
        options=merge_options(run_file, {"num_gpus": "auto"}).options,
        options_on=lambda count: merge_options(run_file, {"num_gpus": count}).options,
    )


def test_one_gpu_is_no_plan_of_deepspeeds_whole_model(read: Read) -> None:
    """What --num-gpus 1 refuses, searches do not take."""
    found = merge_options(read("trl", "use_peft: false", deepspeed=zero(2)), {"num_gpus": "auto"}).options
    (card,) = resolve_targets(["h100-sxm5-80gb"], {})
    question = searched("meta-llama/Llama-3.2-1B", read("trl", "use_peft: false", deepspeed=zero(2)))
    assert tuple(count for count, _ in ways_for(question, card)) == (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
    assert {line.num_gpus for line in lines(found, ("full",), (1, 2, 4), 4)} == {2, 4}
    assert {line.num_gpus for line in lines(found, ("lora",), (1, 2, 4), 4)} == {1, 2, 4}


@pytest.mark.parametrize("typed", [{"num_gpus": 1}, {"num_gpus": 1, "sharding": "zero2"}])
def test_deepspeed_of_one_process_is_refused_where_it_keeps_a_copy(read: Read, typed: dict[str, Any]) -> None:
    found = read("trl", "use_peft: false", deepspeed=zero(2))
    with pytest.raises(NotSupportedError, match="DeepSpeed on one GPU"):
        merge_options(found, typed)
    assert merge_options(read("trl", deepspeed=zero(2)), {"num_gpus": 1}).options["method"] == "lora"


def test_processes_that_machines_do_not_deal_out_are_refused(read: Read) -> None:
    with pytest.raises(InputError, match="num_machines 3 does not divide"):
        read("trl", accelerate=accelerate("MULTI_GPU") | {"num_processes": 16, "num_machines": 3})


SHARDS_OF_8 = "\nfsdp: [full_shard]\nfsdp_version: 2\ndp_shard_size: 8"


def test_shards_of_a_file_are_kept_by_searches_and_plans(read: Read) -> None:
    """axolotl's dp_shard_size 8: copies of eight beyond that, and no number that eights do not make."""
    found = merge_options(read("axolotl", SHARDS_OF_8), {"num_gpus": "auto"}).options
    (card,) = resolve_targets(["a100-sxm4-80gb"], {})
    question = searched("meta-llama/Llama-3.1-8B", read("axolotl", SHARDS_OF_8))
    assert tuple(count for count, _ in ways_for(question, card)) == (1, 8, 16, 24, 32, 48, 64, 96, 128)
    assert [with_count(question, count).options.get("sharding") for count in (1, 8, 16)] == [None, "fsdp", "hsdp"]
    planned = {(line.num_gpus, line.sharding) for line in lines(found, ("lora",), (1, 2, 4, 8, 16), 64)}
    assert planned == {(1, "none"), (8, "fsdp"), (16, "fsdp")}
    line = _Line(method="lora", num_gpus=16, sharding="fsdp", checkpointing=True)
    assert line_options(found, line, 1, 64)["sharding"] == "hsdp"
    assert merge_options(read("axolotl", SHARDS_OF_8), {"num_gpus": 16.0}).options["sharding"] == "hsdp"
    for wrong in ({"gpus_per_node": "x"}, {"gpus_per_node": 4.5}, {"tp": "x"}):
        with pytest.raises(InputError, match="must be a whole number"):
            merge_options(read("axolotl", SHARDS_OF_8), {"num_gpus": 16, **wrong})


def test_a_command_line_that_brings_fsdp_brings_its_shards(read: Read) -> None:
    merged = merge_options(read("llama-factory", "finetuning_type: full"), {"sharding": "fsdp", "num_gpus": 8})
    assert (merged.options["dtype"], merged.options["master_dtype"]) == ("bf16", "fp32")


def test_deepspeed_casts_everything_and_says_so(read: Read) -> None:
    options = read("trl", "dtype:", deepspeed=zero(2)).options
    assert (options["dtype"], options["precision"], options["adapter_dtype"]) == ("bf16", "bf16", "bf16")
    assert any("fp32 copy and fp32 optimizer states" in note for note in read("trl", deepspeed=zero(2)).notes)
    half = read("trl", "fp16: true", deepspeed=zero(2)).options
    assert (half["dtype"], half["precision"]) == ("fp16", "fp16")


@pytest.mark.parametrize(
    ("preset", "gpus", "sharding"), [("zero3", 8, "zero3"), ("fsdp2", 8, "fsdp"), ("single_gpu", 1, None)]
)
def test_trl_names_accelerate_files_that_it_ships(read: Read, preset: str, gpus: int, sharding: str | None) -> None:
    options = read("trl", f"accelerate_config: {preset}").options
    assert (options["num_gpus"], options.get("sharding")) == (gpus, sharding)
    assert read("trl", f"accelerate_config: {preset}\nnum_processes: 2").options["num_gpus"] == 2
    with pytest.raises(InputError, match="accelerate_config is mine, neither a file found from here"):
        read("trl", "accelerate_config: mine")


def test_trls_accelerate_files_are_those_it_ships() -> None:
    trl = pytest.importorskip("trl")
    shipped = {path.stem: path for path in (Path(trl.__file__).parent / "accelerate_configs").glob("*.yaml")}
    presets = load_frameworks()["trl"]["accelerate_presets"]
    assert presets
    for name, ours in presets.items():
        theirs = yaml.safe_load(shipped[name].read_text(encoding="utf-8"))
        for field, value in ours.items():
            told = {key: theirs[field].get(key) for key in value} if isinstance(value, dict) else theirs[field]
            assert told == value, f"{name}: {field}"
        assert ours["mixed_precision"] == theirs["mixed_precision"]


@pytest.mark.parametrize(
    ("line", "precision", "master"), [("", "bf16-autocast", "fp32"), ("mixed_precision: 'no'", "bf16", None)]
)
def test_a_preset_raises_shards_unless_the_launcher_is_told_otherwise(
    read: Read, line: str, precision: str, master: str | None
) -> None:
    options = read("trl", f"dtype: bfloat16\nbf16: false\nuse_peft: false\naccelerate_config: fsdp2\n{line}").options
    assert (options["precision"], options.get("master_dtype")) == (precision, master)


def test_companions_that_the_file_names_are_found_beside_it(tmp_path: Path, minimal: Callable[..., Any]) -> None:
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "z2.json").write_text(json.dumps(zero(2)))
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(accelerate("FSDP")))
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(minimal("llama-factory") | {"deepspeed": "ds/z2.json"}))
    assert read_config(run).options["sharding"] == "zero2"
    run.write_text(yaml.safe_dump(minimal("trl") | {"accelerate_config": "fsdp.yaml"}))
    assert read_config(run).options["sharding"] == "fsdp"
    run.write_text(yaml.safe_dump(minimal("axolotl") | {"deepspeed": "ds/absent.json"}))
    with pytest.raises(InputError, match=r"deepspeed names ds/absent.json, .* add --deepspeed FILE"):
        read_config(run)


def test_deepspeed_may_stand_in_the_file(read: Read) -> None:
    assert read("trl", "deepspeed: {zero_optimization: {stage: 3}}").options["sharding"] == "zero3"


@pytest.mark.parametrize(
    ("form", "lines", "sharding"),
    [
        ("trl", "fsdp: full_shard", "fsdp"),
        ("trl", "fsdp: full_shard auto_wrap", "fsdp"),
        ("trl", "fsdp: ''", None),
        ("trl", "fsdp: full_shard\nfsdp_config: {fsdp_version: 2, reshard_after_forward: true}", "fsdp"),
        ("axolotl", "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}", "fsdp"),
        ("axolotl", "fsdp_version: 2\nfsdp_config: {offload_params: false}", "fsdp"),
        ("axolotl", "dp_replicate_size: 4", "ddp"),
    ],
)
def test_fsdp_in_the_training_file_itself(read: Read, form: str, lines: str, sharding: str | None) -> None:
    assert read(form, lines).options.get("sharding") == sharding


@pytest.mark.parametrize(
    ("form", "lines", "version"),
    [
        ("trl", "fsdp: full_shard\nfsdp_config: {version: 1}", 1),
        ("llama-factory", "fsdp: full_shard\nfsdp_config: {fsdp_version: '2'}", 2),
        ("llama-factory", "fsdp: full_shard", 1),
        ("axolotl", "fsdp_version: 1\nfsdp: [full_shard]\nfsdp_config: {offload_params: false}", 1),
        ("axolotl", "fsdp_version: 2\nfsdp_config: {offload_params: false}", 2),
        ("trl", "accelerate_config: fsdp1", 1),
        ("trl", "accelerate_config: fsdp2", 2),
    ],
)
def test_the_version_of_fsdp_is_read(read: Read, form: str, lines: str, version: int | None) -> None:
    found = read(form, lines)
    assert found.options.get("fsdp_version") == version
    assert not [field for field in found.ignored if "version" in field]


@pytest.mark.parametrize(("stated", "version"), [("", 1), ("  fsdp_version: 1\n", 1), ("  fsdp_version: 2\n", 2)])
def test_accelerate_takes_version_one_where_its_file_names_none(tmp_path: Path, stated: str, version: int) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text(f"distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_offload_params: false\n{stated}")
    file = tmp_path / "trl.yaml"
    file.write_text("model_name_or_path: Qwen/Qwen2.5-0.5B\noutput_dir: out\n")
    assert read_config(file, accelerate=config).options["fsdp_version"] == version
    config.write_text(config.read_text().replace(stated, "") + "  fsdp_version: 3\n")
    with pytest.raises(InputError, match="FSDP has versions 1 and 2"):
        read_config(file, accelerate=config)


@pytest.mark.parametrize(
    ("form", "lines", "says"),
    [
        ("trl", "dtype:\nuse_peft: false", "TRL loads the base in float32"),
        ("llama-factory", "finetuning_type: full", "LLaMA-Factory trains fp32 weights"),
    ],
)
def test_deepspeeds_bf16_takes_back_what_was_told_of_fp32_weights(read: Read, form: str, lines: str, says: str) -> None:
    assert any(says in note for note in read(form, lines).notes)
    cast = read(form, lines, deepspeed=zero(3))
    assert cast.options["dtype"] == "bf16"
    assert not any(says in note for note in cast.notes)
    assert any("DeepSpeed trains in pure bf16" in note for note in cast.notes)
    assert any(says in note for note in read(form, lines, accelerate=accelerate("MULTI_GPU")).notes)


def test_a_sharded_file_without_gpus_names_the_file(read: Read) -> None:
    found = read("llama-factory", "finetuning_type: full", deepspeed=zero(3))
    options = {name: value for name, value in found.options.items() if name not in RUN_OPTIONS_ELSEWHERE}
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    with pytest.raises(InputError, match=r"^The training file asks for zero3 \(deepspeed, .*add for example --num-"):
        resolve_run(llama, options, option_origins=found.origins)
    assert resolve_run(llama, options | {"num_gpus": 8}, option_origins=found.origins).run.sharding == "zero3"


@pytest.mark.parametrize(
    "ours", [{"bf16": {"enabled": "auto"}}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": False}}]
)
def test_16_bits_that_both_files_state_agree(read: Read, ours: dict[str, Any]) -> None:
    assert read("llama-factory", "bf16: true", deepspeed=zero(2) | ours).options["precision"] == "bf16"


@pytest.mark.parametrize("other", [{"bf16": {"enabled": False}}, {"fp16": {"enabled": True}}])
def test_16_bits_that_two_files_state_differently_are_refused(read: Read, other: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"(bf16|fp16).enabled is .* means bf16; make them agree or write auto"):
        read("llama-factory", "bf16: true", deepspeed=zero(2) | other)


def test_overlap_comm_is_read_where_a_stage_leaves_it_open(read: Read) -> None:
    assert read("llama-factory", deepspeed=zero(2, overlap_comm=True)).options["overlap_comm"] is True
    assert read("llama-factory", deepspeed=zero(1, overlap_comm=False)).options["overlap_comm"] is False
    assert "overlap_comm" not in read("llama-factory", deepspeed=zero(3, overlap_comm=False)).options


@pytest.mark.parametrize(("stated", "elements"), [(5e8, 500_000_000), (200_000_000, 200_000_000), ("auto", 4096**2)])
def test_the_bucket_of_zero_is_read(read: Read, stated: Any, elements: int) -> None:
    """``auto`` is the square of the hidden size, as transformers fills it in."""
    found = read("llama-factory", "finetuning_type: full", deepspeed=zero(3, reduce_bucket_size=stated))
    options = {name: value for name, value in found.options.items() if name not in RUN_OPTIONS_ELSEWHERE}
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    assert resolve_run(llama, options | {"num_gpus": 8}).run.reduce_bucket_size == elements
    with pytest.raises(NotSupportedError, match="stage: 0 asks for DeepSpeed without ZeRO"):
        read("llama-factory", deepspeed=zero(0, reduce_bucket_size=5e8))


def test_a_bucket_is_a_whole_number_of_elements(read: Read) -> None:
    with pytest.raises(InputError, match=r"reduce_bucket_size is 0\.5, but it must be a whole number"):
        read("llama-factory", deepspeed=zero(2, reduce_bucket_size=0.5))
    with pytest.raises(InputError, match=r"reduce-bucket-size is 'large', but it counts elements; type a whole number"):
        resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), {"reduce_bucket_size": "large"})
