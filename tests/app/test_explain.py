"""Every term of a forecast, and that terms add up to it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tunecast
from tunecast.cli.program import program
from tunecast.explain import explain
from tunecast.model.priors import load_priors

MODEL = "meta-llama/Llama-3.2-1B"
CACHES = ("rtx-4090-24gb", "a100-sxm4-80gb")
"""A card whose cache is much faster than its memory, and one whose is not."""
runner = CliRunner()
GIB = re.compile(r"([\d.]+) GiB")


def gib_of(text: str) -> float:
    found = GIB.match(text)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("options", [{"method": "qlora"}, {"method": "full", "num_gpus": 4}])
def test_memory_terms_add_up_and_every_term_has_a_formula(options: dict[str, object]) -> None:
    told = tunecast.estimate(MODEL, gpu="a100-sxm4-80gb", tokens="1M", **options)[0]
    terms = explain(MODEL, gpu="a100-sxm4-80gb", tokens="1M", **options)
    resolved = {term.name: (term.value, term.origin) for term in terms if term.section == "resolved run"}
    assert resolved["method"] == (options["method"], "asked for")
    assert resolved["per_device_train_batch_size"] == (str(told.run.per_device_train_batch_size), "assumed")
    assert all(term.formula for term in terms if term.section != "resolved run")
    memory = {term.name: gib_of(term.value) for term in terms if term.section == "memory"}
    named = {"allocated", "reserved", "process", "usable"}
    parts = sum(value for name, value in memory.items() if name not in named)
    assert parts == pytest.approx(memory["allocated"], abs=0.001 * len(memory))
    assert memory["process"] == pytest.approx(told.memory.process_bytes.value / 2**30, abs=0.001)
    times = {term.name for term in terms if term.section == "time"}
    assert {name.replace("_", " ") for name, value in told.time_parts_s.items() if value > 0} <= times
    assert {term.section for term in terms} == {"resolved run", "memory", "time", "run", "money"}
    phases = [term.name for term in terms if term.section == "run"]
    assert phases == [*told.phases_h, "whole run"]
    assert all(term.origin for term in terms if term.section == "time" and term.name != "bubble")


def test_the_speed_of_products_is_work_over_time() -> None:
    (term,) = (t for t in explain(MODEL, gpu="l40s", method="lora") if (t.section, t.name) == ("time", "gemm"))
    work = re.search(r"([\d.]+) TFLOP: ([\d.]+) TFLOP/s", term.inputs)
    assert work is not None
    value, unit = term.value.split()
    part_s = float(value) * (1e-3 if unit == "ms" else 1.0)
    assert float(work[1]) / part_s == pytest.approx(float(work[2]), rel=0.01)


@pytest.mark.parametrize(
    "more",
    [
        {"mean_tokens": 100, "max_length": 1024, "packing": False, "per_device_train_batch_size": 4},
        {"mean_tokens": 1000, "max_length": 4096, "packing": False, "padding_free": True,
         "attn_implementation": "flash_attention_2", "per_device_train_batch_size": 8},
        {"mean_tokens": 1000, "max_length": 4096, "packing": False, "group_by_length": True,
         "per_device_train_batch_size": 8},
    ],
)  # fmt: skip
def test_the_work_beside_a_time_is_that_of_the_rows_that_are_timed(more: dict[str, Any]) -> None:
    """Rows of padded samples are shorter than ``max_length``, whose FLOPs would mean more than a card can do."""
    terms = explain(MODEL, gpu="a100-sxm4-80gb", method="lora", num_samples="20k", **more)
    shares = [float(share) for term in terms for share in re.findall(r"(\d+)% of peak", term.inputs)]
    assert len(shares) >= 2
    assert max(shares) <= 100


def test_the_logits_of_samples_laid_end_to_end_are_those_of_the_largest_micro_batch() -> None:
    more = {"mean_tokens": 1000, "max_length": 4096, "packing": False, "padding_free": True, "num_samples": 10_000,
            "attn_implementation": "flash_attention_2", "per_device_train_batch_size": 8}  # fmt: skip
    (logits,) = (t for t in explain(MODEL, gpu="a100-sxm4-80gb", method="lora", **more) if t.name == "logits")
    tokens = int(logits.inputs.split(" tokens")[0].replace(",", ""))
    assert 8 * 1000 < tokens < 8 * 4096


def test_no_rate_of_a_link_is_above_the_link() -> None:
    """An A100's NVLink carries 300 GB/s one way; bytes over the seconds that nothing hides are no rate."""
    asked = {"gpu": "a100-sxm4-80gb", "method": "full", "num_gpus": 8, "sharding": "fsdp", "max_length": 2048}
    (term,) = (t for t in explain(MODEL, **asked) if (t.section, t.name) == ("time", "communication"))
    assert " GB; " in term.inputs
    assert all(float(rate) <= 300 for rate in re.findall(r"([\d.]+) GB/s", term.inputs))


def test_what_a_gpu_copies_around_collectives_is_told_apart() -> None:
    """DDP reads and writes every gradient into a bucket and back: 16 bits of 1.24B parameters, four times."""
    asked = {"gpu": "a100-sxm4-80gb", "method": "full", "num_gpus": 8, "precision": "bf16"}
    (term,) = (t for t in explain(MODEL, **asked, sharding="ddp") if (t.section, t.name) == ("time", "memory"))
    around = re.search(r"of it ([\d.]+) GB around the collectives", term.inputs)
    (told,) = tunecast.estimate(MODEL, **asked, sharding="ddp")
    assert around is not None
    assert float(around[1]) == pytest.approx(4 * 2 * told.total_params / 1e9, rel=0.01)
    assert all("around" not in t.inputs for t in explain(MODEL, gpu="a100-sxm4-80gb", method="full"))


def test_the_update_on_the_host_is_no_traffic() -> None:
    """Its seconds are the host's, and parameters that it updates are not counted as bytes of a link."""
    asked = {"gpu": "a100-sxm4-80gb", "method": "full", "num_gpus": 8, "sharding": "zero2", "offload": "optimizer"}
    (told,) = tunecast.estimate(MODEL, **asked)
    found = {term.name: term for term in explain(MODEL, **asked) if term.section == "time"}
    assert told.time_parts_s["host"] > 0.99 * told.total_params / 1.3e9
    assert "--offload" in found["host"].formula
    sent = re.search(r"([\d.]+) GB;", found["communication"].inputs)
    assert sent is not None
    gradients = 2 * told.total_params * (1 + 1 / 8) + 2 * told.total_params * (1 + 1 / 8)
    assert float(sent[1]) * 1e9 < 1.1 * gradients, "gradients reduced and copied out, weights copied in and gathered"


def test_the_command_prints_terms_below_the_forecast_and_in_json() -> None:
    asked = ["estimate", MODEL, "--gpu", "l40s", "--explain"]
    shown = runner.invoke(program, asked, env={"COLUMNS": "100"})
    assert shown.exit_code == 0
    assert "sum of 2 m n k / rate(m, n, k)" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 100
    answer = json.loads(runner.invoke(program, [*asked, "--json"]).stdout)
    assert {term["section"] for term in answer[0]["terms"]} == {"resolved run", "memory", "time"}


def test_origins_are_those_of_the_curves_that_the_run_follows() -> None:
    """A record's curves of products that this run has none of, stacks of experts, are assumed: of no concern here."""
    (record,) = (Path(__file__).parents[2] / "results" / "records").glob("h100-sxm5-80gb_*.json")
    terms = explain(MODEL, gpu="h100-sxm5-80gb", records=[record])
    origins = {term.name: term.origin for term in terms if term.section == "time"}
    assert origins["gemm"] == f"measured:{record.name}"
    assert origins["trainer"] == "assumed"


@pytest.mark.parametrize(
    ("more", "says"), [([], "name one with --gpu"), (["--gpu", "l40s", "--max-batch"], "--explain")]
)
def test_one_run_on_one_gpu_is_explained(more: list[str], says: str) -> None:
    done = runner.invoke(program, ["estimate", MODEL, "--explain", *more])
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


def test_a_number_of_gpus_that_was_searched_is_explained_as_it_was_found() -> None:
    asked = ["estimate", MODEL, "--gpu", "l40s", "--method", "lora", "--tokens", "1M", "--num-gpus", "auto"]
    shown = runner.invoke(program, [*asked, "--explain", "--json"])
    assert shown.exit_code == 0, shown.output
    (found,) = json.loads(shown.stdout)
    (term,) = (term for term in found["terms"] if (term["section"], term["name"]) == ("resolved run", "num_gpus"))
    assert (term["value"], term["origin"]) == (str(found["num_gpus"]), "chosen among what fits")


def test_the_files_own_4_bits_are_said_to_be_the_files(tmp_path: Path) -> None:
    path = tmp_path / "lf.yaml"
    path.write_text(
        "model_name_or_path: meta-llama/Llama-3.2-1B\nstage: sft\nfinetuning_type: lora\nquantization_bit: 4\n"
        "quantization_method: bnb\nbf16: true\n",
        encoding="utf-8",
    )
    terms = explain(str(path), gpu="l40s")
    (field,) = [term for term in terms if term.name == "quant_method"]
    assert (field.value, field.origin) == ("bnb-4bit", "the training file")
    (default,) = [term for term in explain(MODEL, gpu="l40s", method="qlora") if term.name == "quant_method"]
    assert default.origin == "default of the stack or framework"
    assert not [term for term in terms if term.section == "time" and term.value.startswith("0.000")]


def test_a_host_bound_zero3_step_is_its_launches_and_its_hooks_visits() -> None:
    options = {"method": "lora", "num_gpus": 8, "sharding": "zero3", "max_length": 512}
    told = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", **options)[0]
    assert told.bound_by == "host"
    (step,) = [term for term in explain(MODEL, gpu="h100-sxm5-80gb", **options) if term.name == "optimizer step"]
    found = re.search(
        r"as much as ([\d,]+) of the forward, \+ ([\d,]+) visits.* much as ([\d.]+) launches, \+ ([\d,]+) modules that "
        r"the Trainer walks over, each as much as ([\d.]+) launches, x ([\d.]+) us",
        step.inputs,
    )
    assert found is not None
    launches, visits, each, walked, part, cost_us = (float(text.replace(",", "")) for text in found.groups())
    as_launches = launches + visits * each + walked * part
    assert as_launches * cost_us * 1e-6 == pytest.approx(told.step_time_s.value, rel=0.05)


def test_what_priors_add_for_a_new_source_is_told_with_its_share() -> None:
    def formula(gpu: str, **more: float) -> str:
        (term,) = (t for t in explain(MODEL, gpu=gpu, method="lora", **more) if t.name == "optimizer step")
        return term.formula

    told = re.search(r"its work ([\d.]+)% slower, as sources left out", formula("l40s"))
    assert told is not None
    assert float(told[1]) / 100 == pytest.approx(math.exp(load_priors()["source_effect"]["value"]) - 1, abs=6e-4)
    assert "left out" not in formula("l40s", achieved_tflops=100.0)


def test_an_explanation_names_the_cache_and_its_assumption() -> None:
    """Small steps of a 4090 move more bytes a second than its memory does: the term says why, by what is assumed."""
    small = {"method": "lora", "max_length": 512}
    of = {
        gpu: {term.name: term for term in explain(MODEL, gpu=gpu, **small) if term.section == "time"} for gpu in CACHES
    }
    faster, plain = (of[gpu]["memory"] for gpu in CACHES)
    assert "part of it in the cache" in faster.inputs
    assert "assumed" in faster.origin
    assert "in the cache" not in plain.inputs
    assert "assumed" not in plain.origin
