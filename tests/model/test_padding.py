"""Padded micro-batches: when the model is told of padding, and what a mask of it costs.

That the steps themselves are those of the real code is shown by the cases ``with padding`` of the tests against traces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architectures import load_architecture
from tunecast.model.estimate import forecast
from tunecast.model.forecast import Forecast
from tunecast.model.plans import Job, global_batch, plans_that_may_fit
from tunecast.model.question import Question
from tunecast.model.target import resolve_targets
from tunecast.model.whole_run_options import split_whole_run

MODEL = "Qwen/Qwen2.5-0.5B"
UNEVEN: dict[str, Any] = {"max_length": 1024, "mean_tokens": 300, "per_device_train_batch_size": 4}
TOLD = "Padding in micro-batches makes sdpa take an explicit mask"


def ask(gpu: str = "a100-sxm4-80gb", model: str = MODEL, **options: Any) -> Forecast:
    around, rest = split_whole_run(options)
    question = Question(architecture=load_architecture(model), options={"method": "lora", **rest}, whole_run=around)
    return forecast(question, resolve_targets([gpu], {})[0])


def write(folder: Path, lengths: tuple[int, ...]) -> str:
    """A sample per line, of so many tokens at the assumed four bytes each."""
    path = folder / "data.txt"
    path.write_text("\n".join("x" * 4 * length for length in lengths), encoding="utf-8")
    return str(path)


NOTHING_KNOWN: dict[str, Any] = {"max_length": 1024, "per_device_train_batch_size": 4}
PADDED: dict[str, tuple[dict[str, Any], bool]] = {
    "samples of unlike lengths": (UNEVEN, True),
    "said so": ({**NOTHING_KNOWN, "padding_mask": True}, True),
    "nothing known": (NOTHING_KNOWN, False),
    "denied": ({**UNEVEN, "padding_mask": False}, False),
    "packed": ({**UNEVEN, "packing": True, "num_samples": 1000}, False),
    "all as long as a row": ({**UNEVEN, "mean_tokens": 1024}, False),
    "one sample at a time": ({**UNEVEN, "per_device_train_batch_size": 1}, False),
    "one sample at a time, filled up": ({**UNEVEN, "per_device_train_batch_size": 1, "pad_to_multiple_of": 8}, True),
    "one sample at a time in LLaMA-Factory": (
        {**UNEVEN, "per_device_train_batch_size": 1, "stack": "llama-factory"},
        True,
    ),
    "a stack that tells no model": ({**UNEVEN, "stack": "unsloth"}, False),
}


@pytest.mark.parametrize(("options", "padded"), PADDED.values(), ids=PADDED)
def test_rows_of_unlike_samples_are_padded_unless_packed(options: dict[str, Any], padded: bool) -> None:
    found = ask(**options)
    assert found.run.has_padding is padded
    assert any(note.startswith(TOLD) for note in found.notes) is padded


@pytest.mark.parametrize(
    ("lengths", "padded"), [((100, 300), True), ((200, 200), False), ((2000, 3000), False)], ids=str
)
def test_a_file_says_whether_its_samples_differ_once_cut(
    tmp_path: Path, lengths: tuple[int, ...], padded: bool
) -> None:
    found = ask(**NOTHING_KNOWN, dataset=write(tmp_path, lengths))
    assert found.run.has_padding is padded


@pytest.mark.parametrize(("length", "padded"), [(192, False), (200, True), (3000, False)])
def test_one_length_for_all_samples_is_filled_up_where_it_is_no_multiple(
    tmp_path: Path, length: int, padded: bool
) -> None:
    found = ask(max_length=1024, stack="axolotl", dataset=write(tmp_path, (length, length)))
    assert found.run.pad_to_multiple_of == 64
    assert found.run.has_padding is padded


def test_a_mask_keeps_flash_out_and_takes_memory() -> None:
    """All pairs instead of half of them; each of 24 layers keeps its mask as numbers, and keys and values of 64 numbers
    for 14 heads instead of 2."""
    whole = {**NOTHING_KNOWN, "gradient_checkpointing": False}
    masked, free = ask(**whole, padding_mask=True), ask(**whole)
    assert masked.time_parts_s["attention"] > 2 * free.time_parts_s["attention"]
    assert masked.executed_flops_per_step > free.executed_flops_per_step
    assert masked.model_flops_per_step == free.model_flops_per_step
    tokens, pairs = 4 * 1024, 4 * 1024 * 1024
    kept_bytes = 24 * 2 * (pairs + 2 * tokens * 64 * (14 - 2))
    more = masked.memory.allocated_bytes.value - free.memory.allocated_bytes.value
    assert more == pytest.approx(kept_bytes, rel=0.01)
    large = {**whole, "per_device_train_batch_size": 32}  # where the host, of which less is known, does not bound it
    steps = [ask(**large, padding_mask=mask).step_time_s for mask in (True, False)]
    masked_width, free_width = (step.high / step.low for step in steps)
    assert masked_width > free_width


def test_eager_attention_has_masks_anyway() -> None:
    eager = {**NOTHING_KNOWN, "attn_implementation": "eager"}
    assert ask(**eager, padding_mask=True).step_time_s.value == pytest.approx(ask(**eager).step_time_s.value, rel=0.01)


def test_flash_attention_2_is_timed_without_taking_padding_out_and_says_so() -> None:
    flash = {**NOTHING_KNOWN, "attn_implementation": "flash_attention_2"}
    padded = ask(**flash, padding_mask=True)
    assert padded.time_parts_s["attention"] == ask(**flash).time_parts_s["attention"]
    assert any("takes padding out of every layer's" in note for note in padded.notes)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"stack": "unsloth"}, "trains without a mask of padding"), ({"cp": 2, "num_gpus": 2}, "not built yet")],
    ids=["unsloth", "cp"],
)
def test_what_cannot_be_padded_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(NotSupportedError, match=said):
        ask(**NOTHING_KNOWN, padding_mask=True, **options)


def test_plans_of_several_samples_are_padded() -> None:
    options = {"max_length": 1024, "mean_tokens": 300, "num_samples": 1000}
    job = Job(
        architecture=load_architecture(MODEL),
        options=options,
        option_origins={},
        methods=("lora",),
        counts=(1,),
        batch=global_batch({}, (1,), 8),
    )
    plans = plans_that_may_fit(job, resolve_targets(["a100-sxm4-80gb"], {})[0], roomiest_bytes=1e15)
    sizes = {plan.run.per_device_train_batch_size for plan in plans if plan.run.has_padding}
    assert sizes == {2, 4, 8}


def test_a_family_that_always_makes_a_mask_speaks_of_no_padding() -> None:
    found = ask("h200-sxm5-141gb", "tiiuae/falcon-40b", max_length=256)
    assert not any("Padding" in note for note in found.notes)


def test_cards_without_flash_kernels_run_the_same_one_under_a_mask() -> None:
    """Below compute capability 8.0 sdpa runs memory-efficient kernels anyway: a mask doubles the pairs, no more."""
    masked, free = (ask("t4-16gb", **NOTHING_KNOWN, padding_mask=on).time_parts_s["attention"] for on in (True, False))
    assert masked == pytest.approx(2.0 * free, rel=0.05)


def test_attention_that_is_fused_otherwise_takes_no_mask() -> None:
    fused = {**NOTHING_KNOWN, "fused_kernels": "attention"}
    assert ask(**fused, padding_mask=True).time_parts_s["attention"] == ask(**fused).time_parts_s["attention"]


@pytest.mark.parametrize(
    "options",
    [{"packing": True, "tokens": "1M"}, {"attention_length": 200, "attn_implementation": "flash_attention_2"}],
    ids=["packed", "documents"],
)
def test_padding_and_packing_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="leave one out"):
        ask(**NOTHING_KNOWN, padding_mask=True, **options)


def test_rows_that_a_file_pads_to_the_end_are_that_long(tmp_path: Path) -> None:
    """axolotl's pad_to_sequence_len: every row of the length that samples are cut at."""
    data = write(tmp_path, (100, 300))
    found = ask(**NOTHING_KNOWN, dataset=data, rows_padded=True, rows_packed=False)
    assert found.run.has_padding
    assert found.tokens_per_s.value * found.step_time_s.value == pytest.approx(4 * 1024)
    assert any("every one padded to 1024" in note for note in found.notes)
    odd = ask(**{**NOTHING_KNOWN, "max_length": 1000}, dataset=data, rows_padded=64, rows_packed=False)
    assert odd.step_time_s == found.step_time_s, "filled to the next multiple of 64"
    assert odd.memory == found.memory
    assert odd.run_origins["pad_to_multiple_of"] == "file"
