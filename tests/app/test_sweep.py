"""Sweeps against the forecasts they are made of, and against what the inputs must do."""

from __future__ import annotations

import csv
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from ci_share import some_pairs_for_ci
from typer.testing import CliRunner

import tunecast
from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import load_gpus
from tunecast.catalogs.price_book import price_book
from tunecast.cli.options import AMOUNT, PARALLEL
from tunecast.cli.options import RUN as RUN_OPTIONS
from tunecast.cli.options_whole_run import WHOLE_RUN
from tunecast.cli.program import program
from tunecast.model.factors import FactorSet
from tunecast.model.flops import model_flops_per_step
from tunecast.sweep import ANALYSES, other_shardings, other_software, sizes, sweep
from tunecast.sweep_table import grid_mark, rows_of, setting, starred
from tunecast.sweeping import Ask, Point, forecast_of
from tunecast.swept_inputs import NUMBER, SWITCH, TEXT, WHOLE, parse_over, sweepable
from tunecast.tornado import fitted_log_sd

MODEL = "meta-llama/Llama-3.2-1B"
RUN: dict[str, Any] = {"method": "qlora", "max_length": 512, "per_device_train_batch_size": 2}
GPU = "l40s-48gb"
runner = CliRunner()


def told(**more: Any) -> Any:
    return tunecast.estimate(MODEL, gpu=GPU, **{**RUN, **more})[0]


def test_a_grid_is_the_forecast_of_each_combination() -> None:
    found = sweep(MODEL, gpu=GPU, over=["max_length=256,512", "--lora-r=8,64"], metric="step", **RUN)
    assert [at.settings for at in found.points] == [
        {"max_length": length, "lora_r": rank} for length in (256, 512) for rank in (8, 64)
    ]
    for at in found.points:
        assert found.value(at) == told(**at.settings).step_time_s.value


def test_a_tornado_holds_every_choice_at_half_and_double() -> None:
    found = sweep(MODEL, gpu=GPU, tokens="1M", **RUN)
    bars = {bar.name: bar for bar in found.bars}
    base = told(tokens="1M").cost_usd.value
    assert all(bar.base == base for bar in found.bars)
    assert bars["max_length"].low == told(tokens="1M", max_length=256).cost_usd.value
    assert bars["max_length"].high == told(tokens="1M", max_length=1024).cost_usd.value
    assert bars["tokens"].high == told(tokens=2e6).cost_usd.value
    assert bars["gradient_checkpointing"].high == told(tokens="1M", gradient_checkpointing=False).cost_usd.value
    assert bars["gradient_accumulation_steps"].low is None
    swings = [bar.swing for bar in found.bars]
    assert swings == sorted(swings, reverse=True)
    kinds = {bar.kind for bar in found.bars}
    assert kinds == {"choice", "uncertain"}


def test_the_median_offer_is_one_of_machines_of_the_size_that_is_rented() -> None:
    listed = price_book(()).offers_for("a100-sxm4-80gb", 1)
    rents = [job.usd_per_hour for job in listed if job.gpus_paid == 1]
    assert 1 < len(rents) < len(listed)
    found = sweep(MODEL, gpu="a100-sxm4-80gb", tokens="1M", **RUN)
    (bar,) = [bar for bar in found.bars if bar.name == "offer"]
    assert bar.high_setting == f"${statistics.median_high(rents):.2f}/h, the median offer"


def test_uncertain_bars_together_are_as_wide_as_the_interval() -> None:
    """Independent errors add in squares: the bars of a card that no row is of give its interval back, roughly, since
    what slows all of a card's work together is in each of them. Long enough that no slow host holds the upper end."""
    asked = {**RUN, "max_length": 4096}
    found = sweep(MODEL, gpu=GPU, analysis="tornado", metric="step", **asked)
    kinds = {"time of gemm", "time of memory", "time of dequant", "time in the cache", "time model, by runs left out"}
    own = [bar for bar in found.bars if bar.name.startswith("time")]
    assert kinds <= {bar.name for bar in own}
    step = told(max_length=4096).step_time_s
    joined = math.sqrt(sum(math.log(bar.high / step.value) ** 2 for bar in own if bar.high))
    assert joined == pytest.approx(math.log(step.high / step.value), rel=0.4)


def test_what_whole_steps_cannot_tell_apart_is_not_moved_one_by_one() -> None:
    """Products a third slower and traffic a third faster explain the same steps: with the other as it is, each is known
    to a twentieth. Parameters that are one and the same are as unsure as they are by themselves."""
    close = FactorSet(
        gpu=GPU, curves={}, factors={}, step_log_sd=0.0, step_params=("scale.gemm", "scale.memory"),
        step_covariance=((0.09, -0.0886), (-0.0886, 0.09)),
    )  # fmt: skip
    assert fitted_log_sd(close, "scale.gemm") == pytest.approx(math.sqrt(0.09 - 0.0886**2 / 0.09))
    same = replace(close, step_covariance=((0.09, 0.09), (0.09, 0.09)))
    assert fitted_log_sd(same, "scale.gemm") == pytest.approx(0.3)
    assert fitted_log_sd(close, "scale.dequant") == 0.0


def test_an_uncertain_time_moves_the_step_by_its_part() -> None:
    large = {"per_device_train_batch_size": 16, "trainer_loop": False}  # which lets the host run ahead
    base, part = told(**large), told(**large).time_parts_s
    ask = Ask(model=MODEL, gpu=GPU, options={**RUN, **large})
    slower = forecast_of(ask, {}, {"gemm": 1.5})
    assert part["host"] == 0.0
    assert slower.step_time_s.value - base.step_time_s.value == pytest.approx(0.5 * part["gemm"], rel=1e-3)


def test_training_time_is_work_over_speed() -> None:
    found = sweep(MODEL, gpu=GPU, analysis="efficiency-steps", metric="train", **RUN)
    forecast = found.base
    flops, peak = model_flops_per_step(forecast.architecture, forecast.run), load_gpus()[GPU].peaks["bf16"]
    for at in found.points:
        expected_h = at.settings["max_steps"] * flops / (at.settings["mfu"] * peak) / 3600
        assert found.value(at) == pytest.approx(expected_h)


def test_loading_depends_on_disk_and_efficiency_by_their_product() -> None:
    over = ["disk_mb_per_s=200,400", "load_efficiency=0.25,0.5"]
    found = sweep(MODEL, gpu=GPU, over=over, metric="load", max_steps=10, **RUN)
    slow_full, fast_half = (
        found.value(next(at for at in found.points if at.settings == settings))
        for settings in (
            {"disk_mb_per_s": 200.0, "load_efficiency": 0.5}, {"disk_mb_per_s": 400.0, "load_efficiency": 0.25},
        )
    )  # fmt: skip
    assert slow_full == pytest.approx(fast_half)
    values = [found.value(at) for at in found.points]
    assert max(values) == values[0]
    download_s = told(max_steps=1).architecture.total_params * 2 / 1e6 * (1 / 50 - 1 / 200)
    assert (values[0] - values[3]) * 3600 == pytest.approx(download_s, rel=0.02)


@pytest.mark.parametrize("analysis", ANALYSES)
def test_every_analysis_by_name_prints_and_counts_the_same(analysis: str, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    amount = [] if analysis.endswith("-steps") else ["--max-steps", "50"]
    asked = ["sweep", MODEL, "--gpu", GPU, "--method", "lora", *amount, "--analysis", analysis]
    done = runner.invoke(program, [*asked, "--csv", str(table), "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    with table.open() as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == len(answer["rows"]) > 5
    assert list(rows[0]) == list(answer["rows"][0])
    shown = runner.invoke(program, asked, env={"COLUMNS": "100"})
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 100
    assert "…" not in shown.stdout


def test_techniques_change_what_they_are_known_to_change() -> None:
    found = sweep(MODEL, gpu=GPU, analysis="what-if", max_steps=10, **RUN)
    by_name = {row["what if"]: row for row in rows_of(found)}
    base = by_name["as asked"]
    assert by_name["no activation checkpointing"]["memory"] > base["memory"]
    assert by_name["no activation checkpointing"]["step"] < base["step"]
    assert by_name["lora instead of qlora"]["memory"] > base["memory"]
    assert by_name["fp32 instead of 16 bits"]["speed"] < base["speed"]
    sharded = [row for name, row in by_name.items() if "fsdp" in name]
    assert sharded[1]["step"] <= sharded[0]["step"] * (1 + 1e-9)
    assert by_name["8 GPUs, ddp"]["speed"] <= 8 * base["speed"] * (1 + 1e-9)
    assert by_name["8 GPUs, zero3"]["step"] > by_name["8 GPUs, fsdp"]["step"]
    refused = sweep(MODEL, gpu=GPU, analysis="what-if", max_steps=10, **RUN, quant_method="bnb-8bit")
    told = {row["what if"]: row["why_not"] for row in rows_of(refused)}
    assert "ZeRO-3 of a bnb-8bit base is not built" in told["8 GPUs, zero3"]


def test_a_grid_over_models_is_headed_by_the_one_asked_for() -> None:
    found = sweep("Llama-3.2-1B", gpu=GPU, over=["model=meta-llama/Llama-3.1-8B,meta-llama/Llama-3.2-1B"], **RUN)
    assert found.base.model == MODEL
    assert [at.settings["model"] for at in found.points] == ["meta-llama/Llama-3.1-8B", MODEL]


def test_sizes_are_one_family_in_order() -> None:
    names = sizes("meta-llama/Llama-3.1-8B")
    params = [tunecast.load_architecture(name).total_params for name in names]
    assert params == sorted(params)
    assert "meta-llama/Llama-3.1-8B" in names
    assert len(names) <= 6


PICTURES = [["--analysis", "tornado"], ["--analysis", "what-if"], ["--over", "lora_r=8,16"],
            ["--over", "lora_r=8,16", "--over", "max_length=256,512"]]  # fmt: skip


@pytest.mark.parametrize(("more", "suffix"), some_pairs_for_ci(PICTURES, [".svg", ".png"]))
def test_pictures_are_drawn(more: list[str], suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"sweep{suffix}"
    asked = ["sweep", MODEL, "--gpu", GPU, "--max-steps", "50", *more, "--plot", str(path)]
    assert runner.invoke(program, asked).exit_code == 0
    content = path.read_bytes()
    assert GPU.encode() in content if suffix == ".svg" else content.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([], "add --gpu NAME"),
        (["--gpu", "all"], "one GPU"),
        (["--gpu", "l4", "--gpu", "l40s"], "given 2 times"),
        (["--gpu", "l4", "--over", "gpu=l4,l40s"], "tunecast estimate takes --gpu several times"),
        (["--gpu", GPU, "--over", "lenght=1,2"], "max_length"),
        (["--gpu", GPU, "--over", "max_length="], "has no values"),
        (["--gpu", GPU, "--num-gpus", "auto"], "--over num_gpus=1,2,4,8"),
        (["--gpu", GPU, "--over", "num_gpus=1,auto"], "whole number"),
        (["--gpu", GPU, "--over", "max_length=1.5"], "whole number"),
        (["--gpu", GPU, "--over", "max_length=512,foo"], "--over max_length has the value foo"),
        (["--gpu", GPU, "--over", "usd_per_gpu_hour=x"], "--over usd_per_gpu_hour has the value x"),
        (["--gpu", GPU, "--over", "internode_gbps=nan"], "must be a number"),
        (["--gpu", GPU, "--over", "p2p=2"], "--over p2p=on,off"),
        (["--gpu", GPU, "--over", "phase_min=1,2"], "input of a sweep"),
        (["--gpu", GPU, "--over", "mfu=40"], "share of the peak"),
        (["--gpu", GPU, "--over", "lora_r=8", "--analysis", "tornado"], "exclude each other"),
        (["--gpu", GPU, "--over", "lora_r=8", "--over", "lora_r=16"], "twice"),
        (["--gpu", GPU, "--analysis", "hurricane"], "tornado, what-if"),
        (["--gpu", GPU, "--metric", "beauty"], "--metric beauty"),
        (["--gpu", GPU, "--metric", "cost"], "add an amount"),
        (["--gpu", GPU, "--plot", "x.pdf"], "neither .svg nor .png"),
        (["--gpu", GPU, "--plot", "/no/such/folder/x.svg"], "there is no folder"),
    ],
)
def test_what_cannot_be_swept_is_refused_in_one_sentence(asked: list[str], says: str) -> None:
    done = runner.invoke(program, ["sweep", MODEL, *asked])
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_values_are_read_as_their_input_means_them() -> None:
    assert parse_over("max-length=512, 1024") == ("max_length", [512, 1024])
    assert parse_over("gradient_checkpointing=on,off") == ("gradient_checkpointing", [True, False])
    assert parse_over("tokens=1M,2M") == ("tokens", ["1M", "2M"])
    assert parse_over("optim=adamw_torch,sgd") == ("optim", ["adamw_torch", "sgd"])
    assert parse_over("stack_version=0.24,5") == ("stack_version", ["0.24", "5"])
    assert parse_over("reduce_bucket_size=auto,5e8") == ("reduce_bucket_size", ["auto", 500_000_000])
    assert parse_over("checkpoint_interval_min=auto,7.5") == ("checkpoint_interval_min", ["auto", 7.5])
    with pytest.raises(InputError, match="input of a sweep"):
        parse_over("nothing=1")


def test_a_sweep_takes_every_option_of_the_run_as_the_command_line_types_it() -> None:
    """A number as a number and no other, a version as text. What a list of values cannot be written for is left out."""
    options = {**RUN_OPTIONS, **PARALLEL, **AMOUNT, **WHOLE_RUN}
    # The text of these is parsed by what they mean: a count of GPUs or of elements, where they are no word.
    parsed = {"num_gpus", "reduce_bucket_size", "checkpoint_interval_min"}
    of_pairs, of_words = {"phase_min", "phase_rate", "phase_machine", "data_location"}, {"tokenizer"}
    assert options.keys() - sweepable().keys() == {*of_pairs, *of_words, "allow_long_context"}
    words = {int: WHOLE, float: NUMBER, bool: SWITCH, str: TEXT}
    for name in options.keys() & sweepable().keys() - parsed:
        kind = get_args(options[name])[0]
        plain = next(iter({*get_args(kind), kind} & words.keys()))
        assert sweepable()[name] == words[plain], name


@pytest.mark.parametrize(("value", "told"), [(100.0, "100"), (200.5, "200.5"), (4096, "4096"), ("ddp", "ddp")])
def test_a_setting_is_told_as_it_is_typed(value: object, told: str) -> None:
    assert setting(value) == told


def test_checkpointing_that_follows_from_the_sweep_is_told() -> None:
    """A stack checkpoints whole layers by default, but not beside attention that is recomputed alone."""
    over = ["recompute_attention=true,false"]
    (note,) = sweep(MODEL, gpu=GPU, over=over, **RUN).notes
    assert note.endswith("on with recompute_attention False and off with recompute_attention True")
    assert not sweep(MODEL, gpu=GPU, over=over, gradient_checkpointing=False, **RUN).notes
    assert not sweep(MODEL, gpu=GPU, over=["gradient_checkpointing=true,false"], **RUN).notes


def test_runs_that_may_not_fit_are_marked() -> None:
    over = ["per_device_train_batch_size=3,4,5"]
    found = sweep("Qwen/Qwen3-8B", gpu="rtx-4090-24gb", over=over, metric="memory", method="qlora", max_length=2048)
    verdicts = [at.forecast.verdict for at in found.points if at.forecast is not None]
    assert verdicts == ["fits", "tight", "no"]
    assert [grid_mark(at) for at in found.points] == ["", "~", "*"]
    assert starred(found) == [
        "* does not fit this card: computed as if it did",
        "~ may not fit, or hardly (less than 90% likely)",
    ]


def test_a_sweep_over_layouts_says_whose_software_runs_them() -> None:
    """Splits of layers are Megatron's where nobody gives a stack, and DeepSpeed's copies beside them the Trainer's."""
    points = [
        Point(settings={"tp": tp}, forecast=forecast_of(Ask(model=MODEL, gpu="h100-sxm5-80gb", options=options), {}))
        for tp, options in (
            (1, {"method": "full", "num_gpus": 8, "sharding": "zero1"}),
            (2, {"method": "full", "num_gpus": 8, "sharding": "zero1", "tp": 2}),
        )
    ]
    (note,) = other_software(["tp"], points)
    assert "megatron runs tp 2" in note or "hf-peft runs tp 1" in note
    assert other_software(["tp", "stack"], points) == ()
    assert other_software(["tp"], points[:1]) == ()


def test_a_sweep_says_where_another_sharding_was_taken() -> None:
    """Nobody gave one: 4 GPUs hold copies of 8B until a micro-batch is too much for it."""
    asked: dict[str, Any] = {"method": "lora", "max_length": 2048, "num_gpus": 4}
    found = sweep("meta-llama/Llama-3.1-8B", gpu=GPU, over=["per_device_train_batch_size=1,2,8"], **asked)
    small, _, large = (at.forecast.run.sharding for at in found.points if at.forecast is not None)
    assert (small, large) == ("ddp", "fsdp")
    (note,) = other_shardings(["per_device_train_batch_size"], found.points)
    assert note in found.notes
    assert "fsdp with per_device_train_batch_size 8, and ddp with the rest; --sharding ddp compares one" in note
    assert other_shardings(["per_device_train_batch_size"], found.points[:2]) == ()
    assert other_shardings(["sharding"], found.points) == ()
    counts = sweep(
        "meta-llama/Llama-3.1-8B", gpu="h100-sxm5-80gb", over=["num_gpus=1,2,8"], method="full", max_length=2048
    )
    assert any("--sharding was not given: " in note for note in counts.notes)


def test_a_what_if_names_the_sharding_that_it_takes() -> None:
    asked: dict[str, Any] = {"method": "lora", "max_length": 2048, "num_gpus": 4}
    found = sweep("meta-llama/Llama-3.1-8B", gpu="rtx-4090-24gb", analysis="what-if", **asked)
    names = [str(at.settings["what if"]) for at in found.points]
    assert "full instead of lora, fsdp" in names
    assert "as asked" in names
    assert "8 GPUs, ddp" in names


def test_attention_recomputed_alone_is_beside_whole_layers_in_a_what_if_only() -> None:
    asked = {**RUN, "recompute_attention": True}
    rows = {row["what if"]: row for row in rows_of(sweep(MODEL, gpu=GPU, analysis="what-if", **asked))}
    whole = rows["activation checkpointing instead of attention's"]
    assert whole["step"] == pytest.approx(told(gradient_checkpointing=True).step_time_s.value)
    bars = sweep(MODEL, gpu=GPU, analysis="tornado", **asked).bars
    assert "gradient_checkpointing" not in {bar.name for bar in bars}


@pytest.mark.parametrize("word", ["perhaps", "1"])
def test_a_switch_is_on_or_off(word: str) -> None:
    with pytest.raises(InputError, match="it is on or off; type --over overlap_comm=on,off"):
        sweep(MODEL, gpu=GPU, over=[f"overlap_comm={word}"], **RUN)
