"""Several cards asked at once: one that has no answer does not take the others' away."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import tunecast
from tunecast.catalogs.errors import ImpossibleError, InputError
from tunecast.catalogs.gpus import load_gpus
from tunecast.cli.program import program
from tunecast.left_out import answered, left_out_notes
from tunecast.model.architectures import load_architecture
from tunecast.model.estimate import forecast
from tunecast.model.forecast import Forecast
from tunecast.model.parallel_network import catalog_network
from tunecast.model.question import Question
from tunecast.model.target import Target, resolve_targets

MODEL = "meta-llama/Llama-3.1-8B"
TWO_MACHINES = ["--method", "full", "--num-gpus", "16", "--sharding", "fsdp", "--tokens", "10M"]


def shown(*args: str) -> tuple[int, str]:
    found = CliRunner().invoke(program, ["estimate", MODEL, *args])
    return found.exit_code, found.stdout


def test_cards_whose_network_nobody_states_are_left_out_with_their_reason() -> None:
    known = [gpu for gpu in load_gpus() if catalog_network(gpu) is not None]
    unknown = [gpu for gpu in load_gpus() if catalog_network(gpu) is None]
    asked = [known[0], unknown[0], unknown[1]]
    code, text = shown(*TWO_MACHINES, *(part for gpu in asked for part in ("--gpu", gpu)), "--json")
    assert code == 0
    answers = json.loads(text)
    assert [answer["gpu"] for answer in answers] == [known[0]]
    (note,) = [note for note in answers[0]["notes"] if note.startswith("left out")]
    assert f"{unknown[0]}, {unknown[1]}: 16 GPUs of this card take several machines" in note
    assert shown(*TWO_MACHINES, "--gpu", unknown[0])[0] == 2


def test_a_question_that_no_card_answers_is_refused() -> None:
    with pytest.raises(InputError, match="--num-gpus is 0"):
        tunecast.estimate(MODEL, gpu=["l40s-48gb", "a100-sxm4-80gb"], num_gpus=0)


def test_a_given_speed_leaves_out_the_cards_that_cannot_have_it() -> None:
    found = tunecast.estimate(MODEL, gpu=["h100-sxm5-80gb", "a100-sxm4-80gb"], achieved_tflops=400)
    assert [forecast.gpu for forecast in found] == ["h100-sxm5-80gb"]
    assert any("left out: a100-sxm4-80gb" in note and "312 TFLOP/s" in note for note in found[0].notes)


def test_a_card_above_its_peak_does_not_take_the_others_answer_away() -> None:
    question = Question(architecture=load_architecture(MODEL), options={"method": "lora"})
    slow, fast = resolve_targets(["t4-16gb", "l40s-48gb"], {})
    faster_than_its_peak = replace(slow, peaks=dict.fromkeys(slow.peaks, 1e12))

    def ask(target: Target) -> Forecast:
        return forecast(question, target)

    cards, (answer,) = answered([faster_than_its_peak, fast], ask)
    assert [card.id for card in cards] == [answer.gpu] == ["l40s-48gb"]
    (note,) = [note for note in answer.notes if note.startswith("left out")]
    assert "t4-16gb: HFU of this card comes out at" in note or "t4-16gb: MFU of this card comes out at" in note
    assert "1.000e+12" in note
    for asked in ([faster_than_its_peak], [faster_than_its_peak, faster_than_its_peak]):
        with pytest.raises(ImpossibleError, match="t4-16gb"):
            answered(asked, ask)


def test_one_note_per_reason() -> None:
    cards = [(f"card-{i}", f"card-{i} is too small") for i in range(5)]
    assert left_out_notes(cards) == ("left out: card-0, card-1 and 3 more: this card is too small",)
