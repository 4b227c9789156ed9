"""Names of training software as people write them: what each is, by its own repository, and what is refused."""

from __future__ import annotations

import pytest

from tunecast.calibrate.framework_names import has_own_loop, software_of
from tunecast.calibrate.run_table import SkipRowError

DATE = "2025-06-01"
HUGGING_FACE = (
    "EasyContext (accelerate, DeepSpeed), PyTorch 2.4 nightly",
    "fsdp_qlora train.py (PyTorch FSDP, transformers, bitsandbytes)",
    "HF Transformers Trainer + TRL SFTTrainer + PEFT (pytorch 24.02 container, GSW 25.01)",
    "LongLoRA",
    "Chinese-LLaMA-Alpaca-2",
    "InstructLab training",
    "lmsys/FastChat v0.2.3 (flash-attn monkey patch)",
    "transformers (Trainer API)",
    "run_clm_no_trainer.py",
    "Baichuan2 fine-tune.py (DeepSpeed)",
    "SageMaker HF DLC (transformers 4.46)",
    "accelerate launch train.py",
    "RunPod axolotl template",
    "FastChat train_mem.py",
    "hiyouga/LLaMA-Factory",
    "OpenRLHF train_sft",
    "in-house trainer on top of HF transformers",
    "own PyTorch training loop (HF model)",
    "DLRover ATorch",
    "Soup (transformers, PEFT, March 2025)",
)
"""Software that trains Hugging Face's models."""
MEGATRON = (
    "NeMo / Megatron (NVIDIA PyTorch 24.09)",
    "Megatron-LM core_r0.9.0",
    "bigcode Megatron-LM",
    "Megatron-Core 0.16.1 (sequence parallel)",
)
OWN = ("OLMo-core", "fairseq", "open_lm", "mistral-finetune", "dolomite-engine", "torchtitan (AMD fork)")
"""Software with models of its own."""
REFUSED = (
    ("lightning-thunder", "a compiler of its own"),
    ("OpenAI API", "a service"),
    ("NeMo-RL", "write NeMo AutoModel or Megatron"),
    ("RWKV-LM", "not transformers"),
    ("vLLM", "does not train"),
    ("Alpa", "JAX"),
    ("AWS Neuron", "other accelerators"),
    ("train.py", "names no training software"),
    ("Kubernetes", "names no training software"),
    ("Oumi", "names no training software"),
    ("transformers + zorblax", "'zorblax' is not in the vocabulary"),
    ("zorblax_train.py", "is not in the vocabulary"),
)


@pytest.mark.parametrize("text", HUGGING_FACE)
def test_scripts_around_hugging_faces_models(text: str) -> None:
    assert software_of(text, DATE).code == "transformers"


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("lightning-ai/litgpt", "litgpt"), ("Lightning-AI/litgpt 0.5", "litgpt"), ("PyTorch Lightning", "lightning"),
        ("TRL on Kubernetes", "trl"), ("Axolotl (Kubeflow)", "axolotl"), ("LLaMA-Factory, Run:ai", "llama-factory"),
        ("Kubeflow PyTorchJob, TRL", "trl"), ("Oumi (TRL)", "trl"),
    ],
)  # fmt: skip
def test_what_starts_a_job_is_not_what_trains(text: str, label: str) -> None:
    assert software_of(text, DATE).label == label


@pytest.mark.parametrize("text", MEGATRON)
def test_containers_and_branches_of_megatron(text: str) -> None:
    assert software_of(text, DATE).code == "megatron"


@pytest.mark.parametrize("text", OWN)
def test_software_with_its_own_models_is_not_hugging_faces(text: str) -> None:
    assert software_of(text, DATE).code == ""


@pytest.mark.parametrize(("text", "why"), REFUSED)
def test_what_is_no_training_of_a_known_kind_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(SkipRowError, match=why):
        software_of(text, DATE)


def test_a_wrapper_of_another_stack_keeps_that_stacks_name() -> None:
    """What stands around a trainer in a cell ("template", "script") is not what ran."""
    assert software_of("RunPod axolotl template", DATE).stack == software_of("axolotl", DATE).stack == "axolotl"
    assert software_of("TRL (philschmid run_fsdp_qlora.py)", DATE).label == "trl"
    assert software_of("litgpt, PyTorch nightly of the date", DATE).stack == "litgpt"


def test_a_branch_states_a_version() -> None:
    """``r0.9.0`` is Megatron's spelling of v0.9.0."""
    assert software_of("transformers r4.46.0", DATE).options == software_of("transformers v4.46.0", DATE).options


def test_a_loss_may_be_named_beside_a_trainer_and_versions_be_unstated() -> None:
    named = software_of("TRL SFTTrainer, transformers >= 5.16, accelerate, loss_type chunked_nll", "2026-08-21")
    assert (named.label, named.options["loss_type"]) == ("trl", "chunked_nll")
    assert software_of("HF Trainer (versions not stated)", DATE).options == software_of("HF Trainer", DATE).options


def test_fused_kernels_named_one_by_one_add_up() -> None:
    """As pages list them behind a trainer; a column of software names kernels, not a model's activation."""
    listed = software_of("Hugging Face Trainer with fused RMSNorm, rotary, SwiGLU, cross-entropy kernels", DATE)
    assert listed.fused == "rms_norm,rope,swiglu,cross_entropy"
    assert software_of("transformers, fused RMSNorm", DATE).fused == "rms_norm"
    assert software_of("TRL + Liger, fused rope", DATE).fused == "rms_norm,rope,swiglu"


@pytest.mark.parametrize("text", ["transformers, no fused RMSNorm", "transformers without SwiGLU kernels"])
def test_a_kernel_that_did_not_run_is_not_taken(text: str) -> None:
    with pytest.raises(SkipRowError, match="is not in the vocabulary"):
        software_of(text, DATE)


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("own loop, transformers + PEFT, PyTorch 2.11+cu130", True),
        ("own PyTorch training loop (HF model)", True),
        ("custom training-loop around transformers", True),
        ("HF Trainer", False),
        ("TRL SFTTrainer with a custom collator", False),
        ("", False),
    ],
)
def test_a_loop_that_its_authors_wrote_is_told_from_a_trainer(text: str, own: bool) -> None:
    assert has_own_loop(text) is own


@pytest.mark.parametrize(
    ("text", "driven"),
    [
        ("transformers (Trainer API)", True), ("HF Transformers + TRL 0.9", True), ("Unsloth", True),
        ("axolotl", True), ("LLaMA-Factory", True), ("LMFlow", True), ("", True),
        ("run_clm_no_trainer.py", False), ("accelerate launch train.py", False),
        ("in-house trainer on top of HF transformers", False), ("own PyTorch training loop (HF model)", False),
        ("PyTorch loop with transformers", False), ("torchtune", False), ("LitGPT", False),
        ("OpenRLHF train_sft", False),
        ("fsdp_qlora train.py", False), ("Megatron-LM", False), ("DLRover ATorch", False),
    ],
)  # fmt: skip
def test_who_is_driven_by_the_trainer(text: str, driven: bool) -> None:
    """By their own repositories: `Trainer` or a class made of it, or a loop without."""
    assert software_of(text, DATE).trainer is driven
