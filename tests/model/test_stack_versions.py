"""Defaults of stacks by version: ranges with sources, the one asked for, and what they change of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.experts_modules import of_age
from tunecast.model.losses import FULL_NOTE
from tunecast.model.memory import memory_timeline
from tunecast.model.optimizer import FOREACH_NOTE
from tunecast.model.resolve import resolve_run
from tunecast.model.resolve_stacks import of_stack
from tunecast.model.run import Run
from tunecast.model.stack_versions import chosen_ranges, code_age, silent_note, told_ranges
from tunecast.model.stacks import HF_CODES, METHODS, load_stacks
from tunecast.model.trained import trainable_params
from tunecast.model.units import MEGA
from tunecast.model.versions import in_range, version_key

Make = Callable[..., Architecture]
PACKAGES = [
    (stack, package, entries)
    for stack, facts in load_stacks().items()
    for package, entries in facts.get("packages", {}).items()
]
UNBUILT_SINCE = {"torchtitan": "0.3"}
"""Packages whose newest code is not built."""


@pytest.fixture(scope="module")
def llama(make: Make) -> Architecture:
    return make("llama-3.1-8b")


def run_of(architecture: Architecture, **options: Any) -> Run:
    return resolve_run(architecture, options).run


@pytest.mark.parametrize(("stack", "package", "entries"), PACKAGES, ids=lambda value: str(value)[:14])
def test_ranges_follow_each_other_and_name_their_sources(
    stack: str, package: str, entries: list[dict[str, Any]]
) -> None:
    """Newest first, without gap or overlap; an older one changes something, today's nothing."""
    lows = [entry["versions"].split(",")[0].removeprefix(">=") for entry in entries]
    highs = [entry["versions"].partition("<")[2] for entry in entries]
    assert highs[0] == UNBUILT_SINCE.get(package, "")
    assert highs[1:] == lows[:-1]
    assert sorted(lows, key=version_key, reverse=True) == lows
    assert all(package in entry["source"] or "these" in entry["source"] for entry in entries), stack
    assert not entries[0].get("changes")
    assert all(entry["changes"] for entry in entries[1:])


@pytest.mark.parametrize(("stack", "package", "entries"), PACKAGES, ids=lambda value: str(value)[:14])
def test_every_range_gives_runs_of_every_method(
    llama: Architecture, stack: str, package: str, entries: list[dict[str, Any]]
) -> None:
    for entry in entries:
        version = entry["versions"].split(",")[0].removeprefix(">=")
        for method in set(METHODS) & set(load_stacks()[stack]["defaults"]):
            options = {"stack": stack, "stack_version": f"{package}={version}", "method": method}
            resolved = resolve_run(of_stack(llama, options), options)
            assert f"{package} {entry['versions']}" in resolved.run.stack_version
            assert resolved.origins["stack_version"] == "cli"
            assert resolved.run.hf_code in HF_CODES
            then = {**entry.get("changes", {}).get("all", {}), **entry.get("changes", {}).get(method, {})}
            for field in ("loss_type", "optim", "reentrant", "gradient_checkpointing", "hf_code", "dtype"):
                assert getattr(resolved.run, field) == then.get(field, getattr(resolved.run, field)), field


def test_nothing_asked_is_the_newest_and_says_so(llama: Architecture) -> None:
    resolved = resolve_run(llama, {"stack": "trl"})
    assert (resolved.run.stack_version, resolved.origins["stack_version"]) == (
        "trl >=1.15, torch >=2.11",
        "stack-default",
    )
    assert resolve_run(llama, {}).run.stack_version == "transformers >=5.0, peft >=0.12, torch >=2.11"


@pytest.mark.parametrize(
    ("stack", "version", "method", "expected"),
    [
        (
            "hf-peft",
            "5.17",
            "lora",
            {"dtype": "bf16", "reentrant": False, "optim": "adamw_torch_fused"},
        ),
        ("hf-peft", "4.57", "lora", {"dtype": "fp32", "reentrant": True, "optim": "adamw_torch_fused"}),
        ("hf-peft", "4.53.2", "lora", {"optim": "adamw_torch", "hf_code": "4.49"}),
        ("hf-peft", "4.48", "qlora", {"dtype": "fp16", "hf_code": "4.46", "adapter_dtype": "fp32"}),
        ("hf-peft", "transformers=5.1, peft=0.11", "lora", {"dtype": "bf16", "adapter_dtype": "bf16"}),
        ("hf-peft", "4.45,peft=0.11", "lora", {"dtype": "fp32", "adapter_dtype": "fp32", "hf_code": "4.45"}),
        ("hf-peft", "4.45", "full", {"dtype": "fp32", "precision": "bf16-autocast"}),
        ("liger", "4.45", "lora", {"loss_type": "liger", "hf_code": "4.45"}),
        ("trl", "1.6.0", "lora", {"loss_type": "nll", "dtype": "fp32", "reentrant": False}),
        ("trl", "1.16.0", "lora", {"loss_type": "chunked_nll"}),
        ("trl", "1.13", "qlora", {"loss_type": "chunked_nll", "adapter_dtype": "bf16"}),
        ("trl", "0.24", "qlora", {"adapter_dtype": "fp32", "dtype": "bf16", "gradient_checkpointing": True}),
        ("trl", "0.21", "lora", {"gradient_checkpointing": False, "precision": "bf16-autocast"}),
        ("trl", "0.18.2", "lora", {"gradient_checkpointing": False, "precision": "fp32", "optim": "adamw_torch"}),
        ("axolotl", "0.9.2", "lora", {"fused_kernels": ()}),
        ("axolotl", "0.12", "lora", {"fused_kernels": ("lora",)}),
        ("llama-factory", "0.9.0", "lora", {"hf_code": "4.45", "optim": "adamw_torch", "reentrant": True}),
        ("torchtune", "0.3.1", "lora", {"lora_target_modules": ("q_proj", "v_proj")}),
        ("ms-swift", "4.0", "qlora", {"double_quant": True, "lora_r": 8, "lora_dropout": 0.05, "reentrant": True}),
        ("ms-swift", "3.5.3", "lora", {"optim": "adamw_torch", "hf_code": "4.49"}),
        ("torchtune", "0.2.1", "lora", {"optim": "adamw_torch"}),
        ("unsloth", "2025.6.2", "qlora", {"loss_type": "cut_cross_entropy"}),
        ("unsloth", "2024.12.4", "qlora", {"loss_type": "cut_cross_entropy", "hf_code": "4.46"}),
        ("unsloth", "2024.11.7", "lora", {"loss_type": "nll"}),
        ("unsloth", "2024.8", "lora", {"loss_type": "nll"}),
    ],
)
def test_what_an_older_version_changes(
    llama: Architecture, stack: str, version: str, method: str, expected: dict[str, Any]
) -> None:
    run = run_of(llama, stack=stack, stack_version=version, method=method)
    assert {name: getattr(run, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"loss_type": "nll"}, True),
        ({"loss_type": "nll", "stack_version": "1.14"}, False),
        ({"loss_type": "nll", "stack_version": "1.0"}, False),
        ({}, False),
    ],
)
def test_whole_logits_beside_todays_trl_are_told(llama: Architecture, options: dict[str, Any], told: bool) -> None:
    notes = resolve_run(llama, {"stack": "trl", **options}).notes
    assert (FULL_NOTE in notes) == told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"method": "full"}, True),
        ({"method": "full", "stack": "liger"}, True),
        ({"method": "full", "optim": "adamw_torch"}, False),
        ({"method": "full", "stack_version": "5.0"}, False),
        ({"method": "full", "stack": "trl"}, False),
        ({"method": "lora"}, False),
    ],
)
def test_the_trainers_own_optimizer_is_told_where_none_was_named(
    llama: Architecture, options: dict[str, Any], told: bool
) -> None:
    """transformers 5.23 training_args.py: ``adamw_torch_fused`` with torch 2.8 or later."""
    found = resolve_run(llama, options)
    assert (FOREACH_NOTE in found.notes) == told
    assert not told or found.run.optim == "adamw_torch"


@pytest.mark.parametrize(
    ("targets", "rank", "millions"), [("c_attn", 2, 1.05), ("c_attn", 8, 4.19), ("c_attn", 64, 33.55), (None, 8, 17.89)]
)
def test_ms_swifts_page_counts_the_same_trained_parameters(targets: str | None, rank: int, millions: float) -> None:
    """ms-swift docs/source_en/LLM/Benchmark.md, qwen-7b-chat; its default since is all linear maps at rank 8."""
    qwen = load_architecture("Qwen/Qwen-7B-Chat")
    run = run_of(qwen, stack="ms-swift", lora_r=rank, **({"lora_target_modules": targets} if targets else {}))
    assert trainable_params(qwen, run) / MEGA == pytest.approx(millions, abs=0.005)


def test_torchtunes_recipes_leave_the_keys_alone(llama: Architecture) -> None:
    targets = run_of(llama, stack="torchtune").lora_target_modules
    assert set(targets) == {"q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_adapters_of_the_bases_dtype_follow_what_the_user_says(llama: Architecture) -> None:
    """PEFT before 0.12."""
    run = run_of(llama, stack_version="4.50,peft=0.8", dtype="bf16")
    assert (run.dtype, run.adapter_dtype) == ("bf16", "bf16")


def test_without_a_version_the_update_is_foreach_and_with_one_that_versions(llama: Architecture) -> None:
    assert run_of(llama).optim == run_of(llama, stack="liger").optim == "adamw_torch"
    assert run_of(llama, stack_version="5.23").optim == "adamw_torch_fused"
    assert run_of(llama, stack_version="peft=0.17").optim == "adamw_torch"


def test_what_is_typed_wins_over_the_version(llama: Architecture) -> None:
    resolved = resolve_run(llama, {"stack": "trl", "stack_version": "1.2", "loss_type": "chunked_nll"})
    assert (resolved.run.loss_type, resolved.origins["loss_type"]) == ("chunked_nll", "cli")


def test_a_base_that_transformers_4_loads_in_fp32_is_told_and_twice_as_large(llama: Architecture) -> None:
    old = resolve_run(llama, {"stack_version": "4.52"})
    assert any("add --dtype bf16" in note for note in old.notes)
    assert not any("add --dtype bf16" in note for note in resolve_run(llama, {}).notes)
    rest = [memory_timeline(llama, run).parts_bytes["weights"] for run in (old.run, run_of(llama))]
    assert rest[0] == pytest.approx(2 * rest[1], rel=1e-3)


def test_shifted_logits_keep_the_16_bit_ones_alive(llama: Architecture) -> None:
    """transformers 4.46 to 4.48, whose peaks IBM published (``test_fused_kernels.py``), against 4.49."""
    options = {"dtype": "bf16", "optim": "adamw_torch", "max_length": 1024, "per_device_train_batch_size": 4}
    older, newer = (memory_timeline(llama, run_of(llama, stack_version=v, **options)) for v in ("4.48", "4.49"))
    assert older.peak_moment == newer.peak_moment == "loss"
    assert older.allocated_bytes - newer.allocated_bytes > 2 * 4 * 1024 * llama.vocab_size


def test_experts_are_modules_before_transformers_5() -> None:
    mixtral = architecture_from_config(
        {
            "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048, "num_local_experts": 8,
            "num_experts_per_tok": 2, "max_position_embeddings": 4096,
        },
        "small",
    )  # fmt: skip
    assert of_age(mixtral, {"stack_version": "5.2"}) == of_age(mixtral, {}) == mixtral
    assert of_age(mixtral, {"stack_version": "4.57"}) == of_age(mixtral, {"hf_code": "4.46"}) != mixtral
    assert code_age({"stack": "trl", "stack_version": "0.24"}) == "4.49"
    assert code_age({"stack_version": "4.45", "hf_code": "5"}) == "5"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stack_version": "4.20"}, r"transformers 4.20 are recorded; --stack-version takes versions >=5.0; >=4.54"),
        ({"stack_version": "newest"}, "'newest' is no version"),
        ({"stack_version": "trl=1.8"}, "names trl, but versions of hf-peft are recorded for transformers, peft, torch"),
        ({"stack": "litgpt", "stack_version": "0.2"}, "No defaults of litgpt 0.2 are recorded; --stack-version takes"),
    ],
)
def test_versions_that_are_not_recorded_are_refused(llama: Architecture, options: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        resolve_run(llama, options)


@pytest.mark.parametrize(("version", "told"), [("9.9", True), ("5.2", True), (">=5.0", False), ("4.55", False)])
def test_a_version_in_the_newest_range_says_that_its_defaults_may_be_older(
    llama: Architecture, version: str, told: bool
) -> None:
    """No range ends the newest one, so a version that is not out yet is in it."""
    asked = version if version[0] != ">" else f"transformers {version}"
    said = f"transformers {version} is taken to have the defaults of >=5.0, the newest that are recorded"
    assert (said in resolve_run(llama, {"stack_version": asked}).notes) is told
    assert not any("newest that are recorded" in note for note in resolve_run(llama, {}).notes)


def test_an_unknown_stack_is_refused_with_those_that_are_built(llama: Architecture) -> None:
    with pytest.raises(InputError, match=r"Unknown stack 'foo'\. --stack takes hf-peft") as refused:
        resolve_run(llama, {"stack": "foo"})
    named = str(refused.value).removesuffix(".").replace("hf-peft (the plain one)", "hf-peft").split(" takes ")[1]
    assert set(named.split(", ")) == {name for name, stack in load_stacks().items() if stack["built"]}


def test_bounds_of_ranges_are_versions() -> None:
    assert all(in_range(version_of(entry), entry["versions"]) for _, _, entries in PACKAGES for entry in entries)


def version_of(entry: dict[str, Any]) -> str:
    return str(entry["versions"].split(",")[0].removeprefix(">="))


@pytest.mark.parametrize("asked", [None, "transformers=4.50", "peft=0.11,transformers=4.44"])
def test_what_a_run_says_of_its_versions_is_read_back_as_the_same(llama: Architecture, asked: str | None) -> None:
    first = resolve_run(llama, {"stack_version": asked}).run
    again = resolve_run(llama, {"stack_version": first.stack_version}).run
    assert again == first


def test_an_empty_version_is_refused_in_a_sentence(llama: Architecture) -> None:
    with pytest.raises(InputError, match="gives transformers no version; type transformers="):
        resolve_run(llama, {"stack_version": "transformers="})


def test_packages_whose_version_was_not_asked_for_are_named() -> None:
    assert silent_note("hf-peft", "peft=0.11") == (
        "--stack-version names peft alone: transformers, torch as of today.",
    )
    assert silent_note("hf-peft", None) == ()
    every = chosen_ranges("hf-peft", None)
    assert silent_note("hf-peft", told_ranges(every)) == (), "the ranges that a run prints name all"
