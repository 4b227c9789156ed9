"""``--exact`` from the command line: families without formulas, and what is missing said in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunecast import api
from tunecast.catalogs.errors import UnbuiltFamilyError
from tunecast.cli.program import program
from tunecast.model.families import family_of

CONFIG = {
    "model_type": "persimmon", "architectures": ["PersimmonForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 2048, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_a_family_without_formulas_is_refused_in_a_sentence_that_names_the_option(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(["estimate", config, "--gpu", "l4"], standalone_mode=False) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tunecast: ")
    assert "PersimmonForCausalLM" in err
    assert "--exact" in err
    assert err.count("\n") == 1


def test_a_missing_package_is_bad_input(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunecast.calibrate.exact_source.find_spec", lambda name: None)
    assert program(["estimate", config, "--gpu", "l4", "--exact"], standalone_mode=False) == 2
    assert 'pip install "tunecast[calibrate]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model_type", "named"),
    [("mamba", "MambaForCausalLM"), ("mamba2", None), ("falcon_mamba", "FalconMambaForCausalLM"), ("rwkv", None)],
)
def test_what_is_not_traced_either_is_not_told_to_be(
    model_type: str, named: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    classes = {} if named is None else {"architectures": [named]}
    path.write_text(json.dumps({"model_type": model_type, "hidden_size": 64, "num_hidden_layers": 2, **classes}))
    assert program(["estimate", str(path), "--gpu", "l4"], standalone_mode=False) == 2
    err = capsys.readouterr().err
    assert "no attention" in err
    assert "traces its real" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("named", ["BambaForCausalLM", "Zamba2ForCausalLM", "RecurrentGemmaForCausalLM"])
def test_a_hybrid_has_attention_to_trace(named: str) -> None:
    with pytest.raises(UnbuiltFamilyError, match=r"`tunecast estimate` traces its real code with --exact"):
        family_of(named, "x")


def test_a_model_without_attention_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    capsys.readouterr()  # what torchao, which PEFT imports, says of itself
    mamba = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**mamba, "architectures": ["MambaForCausalLM"]}))
    assert program(["estimate", str(path), "--gpu", "l4", "--exact", "--method", "full"], standalone_mode=False) == 2
    err = capsys.readouterr().err
    assert "is a mamba, whose config has no num_attention_heads: models without attention are not traced yet" in err
    assert err.count("\n") == 1


def test_what_would_make_a_traced_run_fit_comes_from_formulas_or_is_said_not_to_be_searched(config: str) -> None:
    for package in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    big: dict[str, Any] = {"exact": True, "method": "full", "max_length": 512}
    (unknown,) = api.estimate(config, gpu="l4", **{**big, "max_length": 2048, "per_device_train_batch_size": 1024})
    assert not unknown.fits
    assert any("is not searched" in note for note in unknown.notes)
    (known,) = api.estimate("Qwen/Qwen2.5-7B", gpu="a100-sxm4-40gb", **big)
    proposed = [note for note in known.notes if "would make it fit" in note]
    assert any(note.startswith("--method qlora") for note in proposed)
    assert all(note.endswith("(by formula, not traced)") for note in proposed)


@pytest.mark.parametrize("more", [{}, {"sharding": "zero2", "optim": "paged_adamw_32bit"}])
def test_a_traced_family_scales_against_its_own_trace(config: str, more: dict[str, Any]) -> None:
    for package in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    told: list[str] = []
    asked: dict[str, Any] = {"gpu": "rtx-4090-24gb", "exact": True, "told": told.append, "max_length": 128}
    (two,) = api.estimate(config, num_gpus=2, **asked, **more)
    assert len(told) == (2 if more else 1), "one GPU alone has fp32 adapters, DeepSpeed bf16 ones"
    (one,) = api.estimate(config, **asked, **({"optim": more["optim"]} if more else {}))
    assert two.scaling is not None
    assert two.scaling.speedup == pytest.approx(two.tokens_per_s.value / one.tokens_per_s.value, rel=1e-6)
    assert two.time_parts_s["communication"] > 0


def test_the_terms_of_a_traced_family_are_told(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No formula knows Persimmon: its kernels in the terms are those of the trace, and add up to the step."""
    for package in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    asked = ["estimate", config, "--gpu", "l4", "--exact", "--explain", "--max-length", "128", "--json"]
    assert program(asked, standalone_mode=False) in (None, 0)
    (found,) = json.loads(capsys.readouterr().out)
    terms = {term["name"]: term for term in found["terms"] if term["section"] == "time"}
    parts = {name for name, part_s in found["time_parts_s"].items() if part_s > 0}
    assert parts <= terms.keys()
    assert "kernels" in terms["gemm"]["inputs"]
    assert sum(found["time_parts_s"].values()) == pytest.approx(found["step_time_s"]["value"])
    assert program([*asked, "--max-batch"], standalone_mode=False) == 2
    assert "leave out --max-batch" in capsys.readouterr().err


def test_the_traced_family_gets_a_whole_forecast(config: str) -> None:
    for package in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    told: list[str] = []
    found = api.estimate(
        config, gpu=["l4", "a100-sxm4-80gb"], exact=True, told=told.append, max_length=128, tokens="1M", lora_r=8
    )
    assert told == ["tracing all 2 layers"]
    for forecast in found:
        assert forecast.fits
        assert forecast.total_time_h is not None
        assert any("traced from the real code" in note for note in forecast.notes)
    with pytest.raises(UnbuiltFamilyError):
        api.estimate(config, gpu="l4")
