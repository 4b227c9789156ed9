"""`tunecast estimate` end to end: the JSON of the design, exit codes, and every kind of bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tunecast.cli.program import program

MODEL = "meta-llama/Llama-3.1-8B"
FORECAST_KEYS = {
    "schema",
    "scaling",
    "totals",
    "model",
    "gpu",
    "num_gpus",
    "fits",
    "fit_probability",
    "verdict",
    "run",
    "model_flops_per_step",
    "executed_flops_per_step",
    "trainable_params",
    "total_params",
    "memory",
    "step_time_s",
    "tokens_per_s",
    "mfu",
    "hfu",
    "bound_by",
    "time_parts_s",
    "amount_assumed",
    "phases_h",
    "train_time_h",
    "phases",
    "cost_parts_usd",
    "billed_h",
    "billing",
    "energy_kwh",
    "power",
    "interruptions",
    "total_time_h",
    "cost_usd",
    "cost_per_million_tokens_usd",
    "offer",
    "origins",
    "notes",
}


class Answer(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Answer]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process."""

    def command(*arguments: str) -> Answer:
        with pytest.raises(SystemExit) as end:
            program(list(arguments), prog_name="tunecast")
        captured = capsys.readouterr()
        return Answer(int(end.value.code or 0), captured.out, captured.err)

    return command


def forecasts(answer: Answer) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(answer.out)
    return loaded


def test_json_has_the_published_keys_and_nothing_on_stderr(run: Run) -> None:
    answer = run("estimate", MODEL, "--gpu", "a100-sxm4-80gb", "--gpu", "l4", "--tokens", "1M", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert [f["gpu"] for f in forecasts(answer)] == ["a100-sxm4-80gb", "l4-24gb"]
    for forecast in forecasts(answer):
        assert set(forecast) == FORECAST_KEYS
        assert forecast["schema"] == "tunecast.forecast/1"
        for quantity in ("step_time_s", "tokens_per_s", "total_time_h", "cost_usd", "cost_per_million_tokens_usd"):
            assert forecast[quantity]["low"] <= forecast[quantity]["value"] <= forecast[quantity]["high"]
        assert sum(forecast["phases_h"].values()) == pytest.approx(forecast["total_time_h"]["value"])
        assert sum(forecast["cost_parts_usd"].values()) == pytest.approx(forecast["cost_usd"]["value"])


def test_counts_are_those_of_the_real_model(run: Run) -> None:
    """Llama-3.1-8B with rank 16 on all linear layers trains 41,943,040 of 8,030,261,248 (+ adapters) parameters."""
    (forecast,) = forecasts(run("estimate", MODEL, "--method", "lora", "--lora-r", "16", "--gpu", "l40s", "--json"))
    assert forecast["trainable_params"] == 41_943_040
    assert forecast["total_params"] == 8_030_261_248


def test_every_field_of_the_run_says_who_chose_it(run: Run) -> None:
    arguments = ("--method", "qlora", "--max-length", "2048", "--gpu", "l40s", "--json")
    (forecast,) = forecasts(run("estimate", MODEL, *arguments))
    assert forecast["run"]["max_length"] == {"value": 2048, "origin": "cli"}
    assert forecast["run"]["method"]["origin"] == "cli"
    assert forecast["run"]["per_device_train_batch_size"] == {"value": 1, "origin": "assumed"}
    assert forecast["run"]["optim"] == {"value": "adamw_torch", "origin": "stack-default"}


def test_without_an_amount_there_are_no_totals(run: Run) -> None:
    (forecast,) = forecasts(run("estimate", MODEL, "--gpu", "a100-sxm4-80gb", "--json"))
    assert forecast["total_time_h"] is None
    assert forecast["cost_usd"] is None
    assert forecast["cost_per_million_tokens_usd"]["value"] > 0


def test_ten_times_the_tokens_cost_ten_times_as_much(run: Run) -> None:
    def cost(tokens: str) -> float:
        price = ("--usd-per-gpu-hour", "2", "--train-only", "--json")
        answer = run("estimate", MODEL, "--gpu", "l40s", "--tokens", tokens, *price)
        return float(forecasts(answer)[0]["cost_usd"]["value"])

    assert cost("102.4M") == pytest.approx(10 * cost("10.24M"))


def test_achieved_tflops_is_the_classic_calculation(run: Run) -> None:
    """Required FLOPs over 200 TFLOP/s, no interval."""
    (forecast,) = forecasts(run("estimate", MODEL, "--gpu", "h100-sxm5-80gb", "--achieved-tflops", "200", "--json"))
    step_s = forecast["model_flops_per_step"] / 200e12
    assert forecast["step_time_s"] == pytest.approx({"value": step_s, "low": step_s, "high": step_s})


def test_exit_3_when_no_gpu_fits_and_0_when_one_does(run: Run) -> None:
    none = run("estimate", "meta-llama/Llama-3.1-70B", "--method", "full", "--gpu", "t4", "--gpu", "l4", "--json")
    assert none.code == 3
    assert [f["fits"] for f in forecasts(none)] == [False, False]
    assert all(f["step_time_s"]["value"] > 0 for f in forecasts(none))
    assert run("estimate", MODEL, "--method", "qlora", "--gpu", "t4", "--gpu", "h200-sxm5-141gb").code == 0


def test_all_is_the_default_and_names_every_catalog_gpu(run: Run) -> None:
    from tunecast.catalogs.gpus import load_gpus

    assert {f["gpu"] for f in forecasts(run("estimate", MODEL, "--method", "qlora", "--json"))} == set(load_gpus())


def test_a_local_config_is_a_model(run: Run, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (forecast,) = forecasts(run("estimate", str(tmp_path / "config.json"), "--gpu", "l4", "--json"))
    assert forecast["total_params"] == 1_235_814_400


def test_a_training_file_is_read_and_what_is_typed_wins(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "qlora.yaml"
    path.write_text(
        f"base_model: {MODEL}\nadapter: qlora\nload_in_4bit: true\nsequence_len: 4096\nmicro_batch_size: 2\n"
        "lora_r: 8\nlora_target_linear: true\noptimizer: adamw_torch\nmax_steps: 50\nlora_mlp_kernel: false\n"
    )
    (forecast,) = forecasts(run("estimate", str(path), "--lora-r", "64", "--gpu", "l40s", "--json"))
    assert forecast["model"] == MODEL
    assert forecast["run"]["max_length"] == {"value": 4096, "origin": "file"}
    assert forecast["run"]["lora_r"] == {"value": 64, "origin": "cli"}
    assert forecast["train_time_h"]["value"] == pytest.approx(50 * forecast["step_time_s"]["value"] / 3600)
    assert "qlora.yaml was read as axolotl." in forecast["notes"]


def test_the_table_puts_those_that_fit_first(run: Run) -> None:
    arguments = ("--gpu", "t4", "--gpu", "h100-sxm5-80gb", "--tokens", "1M")
    table = run("estimate", "meta-llama/Llama-3.1-70B", "--method", "qlora", *arguments).out
    assert 0 < table.index("h100-sxm5-80gb") < table.index("t4-16gb")


BAD_RUNS = {
    "unknown model": (("estimate", "meta-llama/Llama-3.1-8X"), "Did you mean"),
    "unknown gpu": (("estimate", MODEL, "--gpu", "h1000"), "Did you mean"),
    "ambiguous gpu": (("estimate", MODEL, "--gpu", "h100"), "h100-sxm5-80gb"),
    "unknown method": (("estimate", MODEL, "--method", "dora"), "lora"),
    "rank with full": (("estimate", MODEL, "--method", "full", "--lora-r", "8"), "--method"),
    "4 bit with full": (("estimate", MODEL, "--method", "full", "--bnb-4bit-quant-type", "nf4"), "qlora"),
    "rank 0": (("estimate", MODEL, "--lora-r", "0"), "at least 1"),
    "negative rank": (("estimate", MODEL, "--lora-r", "-4"), "at least 1"),
    "no batch": (("estimate", MODEL, "--per-device-train-batch-size", "0"), "at least 1"),
    "too long": (("estimate", MODEL, "--max-length", "200000"), "--allow-long-context"),
    "negative tokens": (("estimate", MODEL, "--tokens", "-5M"), "--tokens"),
    "no amount": (("estimate", MODEL, "--tokens", "0"), "--tokens"),
    "words for tokens": (("estimate", MODEL, "--tokens", "many"), "--tokens"),
    "two amounts": (("estimate", MODEL, "--tokens", "1M", "--max-steps", "5"), "keep one"),
    "negative epochs": (("estimate", MODEL, "--tokens", "1M", "--num-train-epochs", "-1"), "--num-train-epochs"),
    "negative price": (("estimate", MODEL, "--usd-per-gpu-hour", "-1"), "--usd-per-gpu-hour"),
    "nan price": (("estimate", MODEL, "--usd-per-gpu-hour", "nan"), "--usd-per-gpu-hour"),
    "negative rate": (("estimate", MODEL, "--gpu", "l4", "--achieved-tflops", "-3"), "--achieved-tflops"),
    "sharding alone": (("estimate", MODEL, "--sharding", "fsdp"), "--num-gpus"),
    "unbuilt optimizer": (("estimate", MODEL, "--optim", "galore_adamw"), "galore_adamw"),
    "unbuilt stack": (("estimate", MODEL, "--stack", "xtuner"), "xtuner"),
    "tensor parallel alone": (("estimate", MODEL, "--tp", "2"), "use a multiple of 2"),
    "unknown target": (("estimate", MODEL, "--lora-target-modules", "q_porj"), "q_proj"),
    "cpu without record": (("estimate", MODEL, "--gpu", "cpu"), "tunecast calibrate --device cpu"),
    "no such config": (("estimate", "./nowhere/config.json"), "nowhere"),
    "no such record": (("estimate", MODEL, "--record", "nowhere.json"), "nowhere.json"),
    "no such file": (("estimate", "nowhere.yaml"), "nowhere.yaml"),
    "reading a model as a file": (("estimate", MODEL, "--config-format", "axolotl"), "--config-format"),
    "unknown device": (("measure", MODEL, "--device", "tpu"), "cuda:0"),
    "empty device": (("measure", MODEL, "--device", ""), "cuda:0"),
    "unknown mock": (("measure", MODEL, "--device", "mock:h1000"), "Did you mean"),
    "two modes": (("calibrate", "--quick", "--full"), "keep one"),
    "unknown catalog": (("catalog", "gpu"), "gpus"),
    "nothing to fit": (("fit", "nowhere.json"), "nowhere.json"),
    "nothing to compare": (("compare", "nowhere.json"), "nowhere.json"),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_bad_input_is_one_sentence_with_a_remedy(name: str, run: Run) -> None:
    arguments, remedy = BAD_RUNS[name]
    answer = run(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert len(answer.err.strip().splitlines()) == 1, answer.err
    assert remedy in answer.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "not JSON"),
        ("[1, 2]", "not a tunecast record"),
        ('{"schema": "someone.else/1"}', "not a tunecast record"),
        ('{"schema": "tunecast.record/99"}', "newer tunecast"),
        ('{"schema": "tunecast.record/1"}', "damaged"),
    ],
)
def test_a_file_that_is_no_record_is_named(text: str, words: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    answer = run("estimate", MODEL, "--record", str(path))
    assert answer.code == 2
    assert words in answer.err
    assert str(path) in answer.err


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"model_type": "bert"}'])
def test_a_file_that_is_no_config_is_named(text: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    answer = run("estimate", str(path))
    assert answer.code == 2
    assert str(path) in answer.err


QLORA_FILE = """
base_model: {model}
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_target_modules: [{targets}]
sequence_len: 512
micro_batch_size: 2
"""


def test_targets_that_the_model_has_not_are_passed_over_in_a_file(run: Run, tmp_path: Path) -> None:
    """PEFT adapts those that match (``inject_adapter``): of axolotl's examples/glm4/qlora-32b.yaml five of seven."""
    path = tmp_path / "qlora.yaml"
    model = "zai-org/GLM-4-32B-0414"
    path.write_text(QLORA_FILE.format(model=model, targets="gate_proj, down_proj, up_proj, q_proj, v_proj"))
    (forecast,) = forecasts(run("estimate", str(path), "--gpu", "h100-sxm5-80gb", "--json"))
    typed = ("--gpu", "h100-sxm5-80gb", "--lora-target-modules", "q_proj,v_proj,down_proj", "--json")
    (same,) = forecasts(run("estimate", str(path), *typed))
    named = [each["run"]["lora_target_modules"]["value"] for each in (forecast, same)]
    assert named[0] == named[1]
    assert any(note.startswith("PEFT passes over gate_proj, up_proj: ") for note in forecast["notes"])
    path.write_text(QLORA_FILE.format(model=model, targets="gate_proj"))
    code, _, err = run("estimate", str(path), "--gpu", "h100-sxm5-80gb")
    assert (code, "adapter targets (gate_proj) are no modules" in err, "gate_up_proj" in err) == (2, True, True)


def test_a_copy_on_another_machine_is_told_by_its_models_name(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "qlora.yaml"
    path.write_text(QLORA_FILE.format(model="/data/models/Qwen2.5-0.5B", targets="q_proj"))
    code, _, err = run("estimate", str(path), "--gpu", "l40s")
    assert (code, "or the model by its name, Qwen/Qwen2.5-0.5B" in err) == (2, True)
