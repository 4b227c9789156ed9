"""What ``--num-gpus auto`` says beside its number: the batch that it makes, and what would fit where none does."""

from __future__ import annotations

import tunecast


def test_the_batch_that_copies_add_up_to_is_told() -> None:
    (found,) = tunecast.estimate(
        "meta-llama/Llama-3.1-8B", gpu="l40s-48gb", tokens="20M", num_gpus="auto", deadline="1h",
        per_device_train_batch_size=2, gradient_accumulation_steps=3,
    )  # fmt: skip
    assert found.run.dp > 1
    samples = 2 * 3 * found.run.dp
    assert samples * found.run.max_length == found.run.tokens_per_step
    (note,) = [note for note in found.notes if note.startswith("--num-gpus auto")]
    assert note.endswith(
        f"each of {found.run.dp} data-parallel ranks trains its own samples, so the global batch is {samples}"
    )
    (alone,) = tunecast.estimate("meta-llama/Llama-3.1-8B", gpu="l40s-48gb", tokens="20M", num_gpus="auto")
    assert alone.run.num_gpus == 1
    assert not any("global batch" in note for note in alone.notes)


def test_where_no_number_fits_what_would_on_one_machine_is_told_and_does() -> None:
    """Rows of 65,536 tokens of 70B fit no H100 whole, on however many; split over the 8 of a machine they do."""
    asked = {"gpu": "h100-sxm5-80gb", "method": "lora", "max_length": 65536}
    (found,) = tunecast.estimate("meta-llama/Llama-3.3-70B-Instruct", num_gpus="auto", **asked)
    assert found.fits is False
    (note,) = [note for note in found.notes if note.startswith("8 GPUs: ")]
    assert "--cp 8 --gradient-accumulation-steps 8 would make it fit" in note
    (split,) = tunecast.estimate(
        "meta-llama/Llama-3.3-70B-Instruct", num_gpus=8, cp=8, gradient_accumulation_steps=8, **asked
    )
    assert split.verdict == "fits"
