"""Numbers as people write them into a column: its units and names are read, what may be two numbers is refused."""

from __future__ import annotations

import math

import pytest

from tunecast.calibrate.cell_numbers import NumberError, number_of, sequences_of, with_point
from tunecast.calibrate.published import read_runs
from tunecast.calibrate.validate import judge, read_entries
from tunecast.calibrate.validate_folds import shipped
from tunecast.calibrate.validate_summary import verdict_shares

OWN = {
    "id": "x-1", "model": "Llama 3.1 8B", "method": "lora", "seq_len": "2048", "micro_batch": "2", "gpu": "H100 80GB",
    "gpus": "1", "tokens_per_s": "7000",
}  # fmt: skip


@pytest.mark.parametrize(
    ("column", "text", "value"),
    [
        ("micro_batch", "2 per GPU", 2), ("micro_batch", "2 per device", 2), ("micro_batch", "2/GPU", 2),
        ("micro_batch", "bs=2", 2), ("micro_batch", "MBS=2", 2), ("micro_batch", "2 sequences per GPU", 2),
        ("micro_batch", "per_device_train_batch_size=2", 2), ("micro_batch", "batch size 2", 2),
        ("seq_len", "2048 (max)", 2048), ("seq_len", "max 2048", 2048), ("seq_len", "max_seq_length=2048", 2048),
        ("seq_len", "sequence_len: 4096", 4096), ("seq_len", "8k max", 8192), ("seq_len", "ctx 4096", 4096),
        ("grad_accum", "4 steps", 4), ("grad_accum", "no", 1), ("grad_accum", "1 (none)", 1), ("grad_accum", "GA=4", 4),
        ("grad_accum", "gradient_accumulation_steps=4", 4), ("grad_accum", "4x", 4),
        ("global_batch", "8 sequences", 8), ("global_batch", "1,024 samples", 1024), ("global_batch", "GBS=8", 8),
        ("rank", "r=16, a=16", 16), ("rank", "lora_r=16", 16), ("rank", "r=alpha=16", 16), ("rank", "16 (a=32)", 16),
        ("tokens_per_s", "2700 tps", 2700), ("tokens_per_s", "2,700 t/s", 2700), ("tokens_per_s", "2700 ± 50", 2700),
        ("tokens_per_s", "2700 (±2%)", 2700), ("tokens_per_s", "2700 +/- 50 tok/s", 2700),
        ("tokens_per_s", "2700 tok/s \u00b1 3%", 2700),
        ("tokens_per_s", "1.2M tokens/s", 1.2e6), ("tokens_per_s_per_gpu", "2700 tok/s/GPU", 2700),
        ("tokens_per_s_per_gpu", "2700 tokens/s per GPU", 2700),
        ("seq_len", "4096 (packed)", 4096), ("seq_len", "2048 packed", 2048), ("seq_len", "4k ctx", 4096),
        ("seq_len", "packed to 4096", 4096), ("micro_batch", "x4", 4), ("gpus", "x8", 8), ("grad_accum", "x4", 4),
        ("rank", "r16a32", 16), ("rank", "\u03b1=32 r=16", 16), ("rank", "16 (alpha=2r)", 16),
        ("rank", "16 (rsLoRA)", 16),
        ("tokens_per_s", "40k/s", 40e3), ("tokens_per_s", "40k total", 40e3), ("tokens_per_s", "40\u2019000", 40e3),
        ("tokens_per_s", "40k tokens/s on all GPUs", 40e3), ("tokens_per_s", "2.4M tokens/min", 40e3),
        ("tokens_per_s", "3.456B tokens/day", 40e3), ("tokens_per_s_per_gpu", "18M tokens/GPU/hour", 5e3),
        ("tokens_per_s", "144,000,000 tokens per hour", 40e3), ("tokens_per_s", "2500/s", 2500),
        ("step_time_s", "20 steps/min", 3), ("step_time_s", "4 it/s", 0.25), ("samples_per_s", "19.5/s", 19.5),
        ("step_time_s", "1500 ms", 1.5), ("step_time_s", "1.5 s/it", 1.5), ("step_time_s", "1.500", 1.5),
        ("step_time_s", "1500 ms/step", 1.5), ("step_time_s", "0.120 s", 0.12),
        ("step_time_s", "11.0s \u00b1 0.2s", 11), ("step_time_s", "11 s per optimizer step", 11),
        ("samples_per_s", "87 samples/min", 1.45), ("seq_len", "2,048 tokens per sample", 2048),
    ],
)  # fmt: skip
def test_a_number_in_its_columns_own_words(column: str, text: str, value: float) -> None:
    assert number_of(column, text) == value


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("micro_batch", "2 per node"), ("micro_batch", "2x8"), ("micro_batch", "2 tokens"), ("micro_batch", "GBS=2"),
        ("seq_len", "avg 2048"), ("seq_len", "2048-4096"), ("seq_len", "2M"), ("grad_accum", "4 (none)"),
        ("grad_accum", "4 tokens"), ("global_batch", "bs=8"), ("global_batch", "8 per GPU"), ("rank", "alpha=16"),
        ("rank", "r=16, a=16, b=2"), ("tokens_per_s", "2700 tokens"), ("tokens_per_s", "2700 it/s"),
        ("tokens_per_s_per_gpu", "40k total"), ("step_time_s", "2 it"), ("rank", "a16"), ("seq_len", "ctx"),
        ("step_time_s", "1.5 ms/token"), ("samples_per_s", "2700 tps"),
        ("step_time_s", "11.0s \u00b1 0.2 zebras"), ("step_time_s", "11 s per zebra"),
        ("samples_per_s", "87 zebras/min"), ("seq_len", "2,048 tokens per zebra"),
        ("tokens_per_s_per_gpu", "24k tokens/s/zebra"),
    ],
)  # fmt: skip
def test_another_columns_unit_is_no_number(column: str, text: str) -> None:
    assert math.isnan(number_of(column, text))


@pytest.mark.parametrize(
    ("column", "text", "told"),
    [
        ("seq_len", "8.000", "may be 8 or 8000"), ("gpus", "1.000", "may be 1 or 1000"),
        ("global_batch", "1.024", "may be 1.024 or 1024"), ("micro_batch", "2.000", "may be 2 or 2000"),
        ("seq_len", "1.5k", "may be 1500 or 1536: write which"),
        ("seq_len", "10k", "may be 10000 or 10240: write which"),
        ("tokens_per_s", "2M tokens/GPU/min", "write it into tokens_per_s_per_gpu"),
        ("tokens_per_s", "2700 tok/s/gpu", "write it into tokens_per_s_per_gpu"), ("seq_len", "~2048", "cut or padded"),
    ],
)  # fmt: skip
def test_what_may_be_another_number_is_refused_with_what_to_write(column: str, text: str, told: str) -> None:
    with pytest.raises(NumberError, match=told):
        number_of(column, text)


@pytest.mark.parametrize(
    ("column", "text", "told"),
    [
        ("step_time_s", "1,31", "has a decimal comma: write 1.31"), ("tokens_per_s", "2,5", "decimal comma: write 2.5"),
        ("step_time_s", "1,310", "may be 1.310 or 1310"), ("step_time_s", "0,310", "decimal comma: write 0.310"),
        ("micro_batch", "2,5", "has a comma: write a whole number without one"),
        ("tokens_per_s", "2400-2600", "holds 2 numbers, 2400 and 2600: write one number, the mean"),
        ("micro_batch", "4 x 2", "holds 2 numbers, 4 and 2: write the one that ran"),
        ("tokens_per_s", "2500 MB/s",
        "holds 'MB/s' beside 2500: write the number alone, in tokens per second of all GPUs"),
        ("tokens_per_s", "-5", "is not a number above 0"), ("tokens_per_s", "0 tok/s", "is not a number above 0"),
        ("tokens_per_s", "fast", "is not a number above 0"),
    ],
)  # fmt: skip
def test_what_is_no_number_says_what_was_found_and_what_to_write(column: str, text: str, told: str) -> None:
    assert told in reason(**{"tokens_per_s": "", column: text})


@pytest.mark.parametrize(
    ("column", "text", "pointed"),
    [
        ("step_time_s", "1,31", "1.31"), ("step_time_s", "1,310 s", "1.310 s"), ("tokens_per_s", "2.700,5", "2700.5"),
        ("tokens_per_s", "2700,5 ± 50,2", "2700.5 ± 50.2"), ("tokens_per_s", "1.234.567", "1234567"),
        ("total_time_h", "1,5 h", "1.5 h"), ("internode_gbps", "0,125", "0.125"), ("params_b", "7,62", "7.62"),
        ("tokens_per_s", "1,234,567", "1,234,567"), ("step_time_s", "1,500 ms", "1,500 ms"),
        ("peak_mem_gib", "24,576 MiB", "24,576 MiB"), ("seq_len", "2,048", "2,048"), ("lora_targets", "0,1", "0,1"),
        ("total_tokens_or_steps", "600 steps of 16,384 tokens", "600 steps of 16,384 tokens"),
    ],
)  # fmt: skip
def test_a_decimal_comma_of_a_table_without_commas_is_a_point(column: str, text: str, pointed: str) -> None:
    assert with_point(column, text) == pointed


def test_a_speed_whose_comma_may_group_thousands_is_refused_as_with_a_point() -> None:
    assert "may be 2.7 or 2700" in reason(tokens_per_s=with_point("tokens_per_s", "2,700"))


def test_a_memory_that_is_no_number_says_why_and_leaves_the_speed() -> None:
    (found,), _ = read_runs([{**OWN, "peak_mem_gib": "38,2"}])
    assert found.why_no_memory == "peak_mem_gib '38,2' has a decimal comma: write 38.2"
    assert found.tokens_per_s == 7000


@pytest.mark.parametrize(
    ("text", "gbps"),
    [
        ("3200", 3200), ("400 Gb/s", 400), ("400 Gbps", 400), ("400 Gbit/s", 400), ("400 gbps", 400), ("100G", 100),
        ("100 GbE", 100), ("25 Gb/s Ethernet", 25), ("50 GB/s", 400), ("3.2 Tbps", 3200), ("8x400", 3200),
        ("8 x 400 Gb/s", 3200), ("8x HDR", 1600), ("8x NDR InfiniBand", 3200), ("HDR (200 Gb/s)", 200),
        ("4x200G RoCE v2", 800), ("EFA 3200 Gbps", 3200), ("400 Gb/s per node", 400),
        ("400 Gbps x 8", 3200), ("1600 (8x200)", 1600),
    ],
)  # fmt: skip
def test_a_network_is_counted_in_bits_of_one_machine(text: str, gbps: float) -> None:
    """A byte has eight bits; links of InfiniBand run at 200 (HDR) and 400 Gbit/s (NDR)."""
    assert number_of("internode_gbps", text) == gbps


@pytest.mark.parametrize(
    "text", ["InfiniBand", "400 GB", "400 Gb/s per GPU", "400 Mb", "fast", "1,600", "1600 (8x300)", "400 zebras x 8"]
)
def test_a_network_that_is_no_number_of_gbits(text: str) -> None:
    assert math.isnan(number_of("internode_gbps", text))


@pytest.mark.parametrize("text", ["HDR", "InfiniBand HDR", "HDR200", "HDR 200"])
def test_the_name_of_a_link_does_not_say_how_many_a_machine_has(text: str) -> None:
    """A DGX A100 has eight of them, a cloud's machine one."""
    with pytest.raises(NumberError, match="not how many a machine has: write 200 or 8x200"):
        number_of("internode_gbps", text)


@pytest.mark.parametrize(
    ("text", "seq_len", "sequences"),
    [
        ("4M tokens", 4096, 1024), ("4M tokens", 4000, 1000), ("0.5M tokens", 2048, 256), ("524,288 tokens", 2048, 256),
        ("8", 2048, None), ("8 sequences", 2048, None),
    ],
)  # fmt: skip
def test_a_batch_in_tokens_is_whole_sequences(text: str, seq_len: int, sequences: float | None) -> None:
    assert sequences_of(text, seq_len) == sequences


@pytest.mark.parametrize(
    ("text", "seq_len"), [("8 tokens", 2048), ("512k tokens", 4096), ("1M tokens", 64), ("1.024M tokens", 3000)]
)
def test_a_batch_of_tokens_that_is_no_or_two_numbers_of_sequences(text: str, seq_len: int) -> None:
    assert math.isnan(sequences_of(text, seq_len) or 0.0)


def reason(**cells: str) -> str:
    runs, skipped = read_runs([{**OWN, **cells}])
    return "" if runs else skipped[0].reason


def test_a_batch_in_tokens_says_how_many_micro_batches() -> None:
    (found,), _ = read_runs([{**OWN, "global_batch": "0.5M tokens"}])
    assert found.run.gradient_accumulation_steps == 128
    assert "no whole number of sequences of 2048" in reason(global_batch="5000 tokens")


@pytest.mark.parametrize(
    ("cells", "column"),
    [
        ({"tokens_per_s": "2.700"}, "tokens_per_s '2.700'"),
        ({"tokens_per_s": "2.700 tok/s"}, "tokens_per_s '2.700 tok/s'"),
        ({"tokens_per_s": "", "tokens_per_s_per_gpu": "2.700"}, "tokens_per_s_per_gpu '2.700'"),
    ],
)
def test_three_decimals_are_thousands_where_the_card_could_do_those_too(cells: dict[str, str], column: str) -> None:
    assert reason(**cells).startswith(f"{column} may be 2.7 or 2700")
    assert reason(**cells).endswith("write 2700, or 2.7000")


@pytest.mark.parametrize("text", ["700.125", "2700", "2,700", "2700.0"])
def test_three_decimals_of_a_speed_that_no_card_has_a_thousand_times_are_decimals(text: str) -> None:
    assert not reason(tokens_per_s=text)


@pytest.mark.parametrize("column", ["tokens_per_s", "peak_mem_gib", "step_time_s"])
@pytest.mark.parametrize("text", ["OOM", "oom", "CUDA OOM", "out of memory", "Out-of-memory error"])
def test_a_cell_of_what_was_measured_may_say_that_memory_ran_out(column: str, text: str) -> None:
    row = {**OWN, "tokens_per_s": "", column: text}
    (entry,) = read_entries([row])
    (told,) = read_entries([{**OWN, "tokens_per_s": "", "notes": "OUT OF MEMORY. "}])
    assert (entry.out_of_memory, entry.run) == ("stated", told.run)
    assert entry.run is not None
    assert "ran out of memory" in read_runs([row])[1][0].reason


@pytest.mark.parametrize("notes", ["OOM", "oom at the first step", "CUDA out of memory", "Out of memory: batch of 8"])
def test_notes_of_a_row_without_anything_measured_may_say_that_memory_ran_out(notes: str) -> None:
    row = {**OWN, "tokens_per_s": "", "notes": notes}
    assert read_entries([row])[0].out_of_memory == "stated"
    assert not read_entries([{**row, "tokens_per_s": "7000"}])[0].out_of_memory


def test_a_row_without_anything_measured_is_not_one_that_ran() -> None:
    judged = [judge(entry, shipped) for entry in read_entries([OWN, {**OWN, "tokens_per_s": "", "notes": "planned"}])]
    assert all(item.prediction is not None for item in judged)
    assert verdict_shares(judged)["ran"][1] == 1


def test_a_run_that_ran_did_not_run_out_of_memory() -> None:
    (entry,) = read_entries([{**OWN, "peak_mem_gib": "OOM"}])
    assert entry.reason == "tokens_per_s '7000' and peak_mem_gib 'OOM' contradict each other"
    assert not entry.out_of_memory
    assert not read_entries([{**OWN, "peak_mem_gib": "22 (OOM at 8k)"}])[0].out_of_memory


@pytest.mark.parametrize(("text", "gib"), [("22 GiB per GPU", 22.0), ("22528 MiB/GPU", 22.0), ("22 GB per GPU", None)])
def test_memory_of_one_gpu(text: str, gib: float | None) -> None:
    (found,), _ = read_runs([{**OWN, "peak_mem_gib": text}])
    assert found.peak_bytes == (None if gib is None else gib * 2**30)


@pytest.mark.parametrize("text", ["default", "library default"])
def test_a_default_rank_is_that_of_the_software(text: str) -> None:
    cells = {**OWN, "framework": "Unsloth 2026.1", "quant": "none", "grad_checkpointing": "unsloth", "rank": text}
    (found,), skipped = read_runs([cells])
    assert found.run.lora_r == 16, skipped
    assert any(note.startswith("rank is not stated") for note in found.reading_notes)
