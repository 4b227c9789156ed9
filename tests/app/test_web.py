"""The page: its form, link and command say the same, and it answers as `estimate` does, in a real browser too."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import parse_qsl
from urllib.request import Request, urlopen

import pytest
from browser import DRIVER, browser
from typer.testing import CliRunner

import tunecast
from tunecast.catalogs.errors import InputError
from tunecast.cli.program import program
from tunecast.tables import dollars, seconds
from tunecast.web.answer import answer, forecasts
from tunecast.web.asked import LONGEST_FILE, Fields, command, from_query, gpus_of, link, model_of, options, packed

ASKED = Fields(model="meta-llama/Llama-3.2-1B", method="lora", gpu="l40s-48gb,rtx-4090-24gb", tokens="2M", batch="4")
AXOLOTL = """base_model: meta-llama/Llama-3.2-1B
adapter: lora
lora_r: 8
lora_target_linear: true
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 1
bf16: true
gradient_checkpointing: true
"""


@pytest.mark.parametrize(
    "asked",
    [
        Fields(),
        ASKED,
        Fields(checkpointing=False, num_gpus="auto", max_length="4096"),
        Fields(model="a&b=c d", usd_per_gpu_hour="2.5", accumulation="8"),
    ],
)
def test_a_link_brings_the_form_back(asked: Fields) -> None:
    assert from_query(dict(parse_qsl(link(asked).removeprefix("?"), keep_blank_values=True))) == asked


def opened(query: str) -> Fields:
    """The form of a link, as the page reads it."""
    return from_query(dict(parse_qsl(query.removeprefix("?"), keep_blank_values=True)))


@pytest.mark.parametrize("tokens", ["", "3M", "10M"])
def test_a_link_holds_the_pasted_file_and_no_amount_that_nobody_typed(tokens: str) -> None:
    asked = Fields(config=AXOLOTL + "# \u00fc\n", tokens=tokens, gpu="l40s-48gb")
    back = opened(link(asked))
    assert (back.config, back.tokens, back.gpu) == (asked.config, tokens, asked.gpu)
    assert command(back) == command(asked)
    assert ("--tokens" in command(asked)) == bool(tokens)


def test_a_file_too_long_for_a_link_is_forecast_and_says_so() -> None:
    noise = "".join(f"# {hashlib.sha256(str(i).encode()).hexdigest()}\n" for i in range(300))
    shown, said, how = answer(Fields(config=AXOLOTL + noise, tokens="2M", gpu="l40s-48gb"))
    assert "1 x l40s-48gb" in shown
    assert "send it with the command below" in said
    assert not said.startswith("?")
    assert how.startswith("tunecast estimate config.yaml")


@pytest.mark.parametrize("part", ["eJ", "****", packed(AXOLOTL)[:-9], packed("a" * LONGEST_FILE)[:-4] + "AAAA"])
def test_a_link_that_was_cut_is_one_sentence(part: str) -> None:
    with pytest.raises(InputError, match="cut or changed"):
        from_query({"file": part})


def test_a_link_that_unfolds_without_end_is_refused() -> None:
    bomb = base64.urlsafe_b64encode(zlib.compress(b"a" * LONGEST_FILE * 5)).decode()
    with pytest.raises(InputError, match="cut or changed"):
        from_query({"file": bomb})


def test_a_link_with_short_names_opens_with_the_menus_own() -> None:
    asked = from_query({"model": "llama-3.1-8b", "gpu": "l40s, 4090,nonsense", "method": "LoRA"})
    assert asked.model == "meta-llama/Llama-3.1-8B"
    assert asked.gpu == "l40s-48gb,rtx-4090-24gb,nonsense"
    assert asked.method == "lora"


def test_what_does_not_fit_is_said_first_with_what_would_make_it_fit() -> None:
    asked = Fields(method="full", gpu="l40s-48gb,rtx-4090-24gb")
    shown = answer(asked)[0]
    first = shown.split("<h3>")[1].split("<h4>")[0]
    assert first.startswith("It does not fit any of these 2 cards: 1 x l40s-48gb needs ")
    assert "$" not in first.split("</h3>")[0]
    told = {one.gpu: one for one in tunecast.estimate(asked.model, gpu="l40s-48gb", method="full", tokens="10M",
                                                      max_length=2048, per_device_train_batch_size=1)}  # fmt: skip
    fixes = [note for note in told["l40s-48gb"].notes if "would make it fit" in note]
    assert fixes
    assert all(note in first for note in fixes)
    assert first.index(fixes[0]) < first.index("As if memory sufficed: 1 x l40s-48gb") < first.index("$")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("a: 1\nb: [1\nc: 2\n", "The pasted file, line 3, is no valid YAML"),
        ("just words", "The pasted file holds no mapping"),
        ("foo: 1\n", "The pasted file bears the sign of no known format"),
    ],
)
def test_an_error_in_a_pasted_file_names_it_and_no_path(config: str, says: str) -> None:
    shown = answer(Fields(config=config, tokens="", gpu="l40s-48gb"))[0]
    assert says in shown
    assert tempfile.gettempdir() not in shown
    assert "config.yaml" not in shown


def test_a_link_of_nonsense_is_the_usual_form() -> None:
    assert from_query({"nothing": "1", "__class__": "x"}) == Fields()


def test_the_command_says_the_same_as_the_page() -> None:
    words = shlex.split(command(ASKED))
    assert words[0] == "tunecast"
    done = CliRunner().invoke(program, [*words[1:], "--json"])
    assert done.exit_code == 0, done.output
    by_gpu = {one["gpu"]: one for one in json.loads(done.stdout)}
    for one in forecasts(ASKED):
        assert one.step_time_s.value == by_gpu[one.gpu]["step_time_s"]["value"]
        assert one.run.per_device_train_batch_size == 4


def test_the_answer_shows_every_card_and_the_best_first() -> None:
    shown, said, how = answer(ASKED)
    told = tunecast.estimate(
        ASKED.model, gpu=ASKED.gpu.split(","), method="lora", max_length=2048, tokens="2M",
        per_device_train_batch_size=4,
    )  # fmt: skip
    for one in told:
        assert f"1 x {one.gpu}" in shown
        assert seconds(one.step_time_s.value) in shown
    best = min((one for one in told if one.cost_usd is not None), key=lambda one: one.cost_usd.value)  # type: ignore[union-attr]
    headline = shown.split("<h3>")[1].split("</h3>")[0]
    assert best.gpu in headline
    assert best.cost_usd is not None
    assert dollars(best.cost_usd.value) in headline
    assert said == link(ASKED)
    assert how == command(ASKED)


def test_a_pasted_training_file_takes_the_models_place() -> None:
    pytest.importorskip("yaml")
    found = forecasts(Fields(config=AXOLOTL, gpu="l40s-48gb", model="ignored"))
    assert (found[0].run.lora_r, found[0].run.max_length, found[0].model) == (8, 512, "meta-llama/Llama-3.2-1B")
    assert (
        command(Fields(config=AXOLOTL, gpu="l40s-48gb")) == "tunecast estimate config.yaml --tokens 10M --gpu l40s-48gb"
    )


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Fields(model="/etc/config.json"), "looks like a path"),
        (Fields(model="~/secret.yaml"), "looks like a path"),
        (Fields(model=" "), "No model"),
        (Fields(gpu="cpu"), "command line"),
        (Fields(batch="many"), "--per-device-train-batch-size"),
        (Fields(model="<script>alert(1)</script>", gpu="l40s"), "&lt;script&gt;"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence_and_no_markup(asked: Fields, says: str) -> None:
    shown, said, how = answer(asked)
    assert 'role="alert"' in shown
    assert says in shown
    assert "<script>" not in shown
    assert (said, how) == ("", "")


def test_paths_and_devices_of_the_host_stay_out_of_reach() -> None:
    for name in ("./config.json", "~/x", "/etc/passwd", "run.yml"):
        with pytest.raises(InputError, match="path"):
            model_of(Fields(model=name))
    with pytest.raises(InputError, match="CPU"):
        gpus_of(Fields(gpu="l40s, cpu"))
    assert options(Fields(num_gpus="auto"))["num_gpus"] == "auto"


@pytest.mark.parametrize("named", ["config.json", "secret.env", "nowhere.json", "folder", "there.yaml"])
def test_a_pasted_file_reads_no_other_file_of_the_host(named: str, tmp_path: Path) -> None:
    """Nor tells which there are: what is there and what is not are answered alike."""
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 128, "vocab_size": 99}))
    (tmp_path / "secret.env").write_text("KEY=1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.yaml").write_text("zero_optimization: {stage: 2}")
    path = str(tmp_path / named)
    lora = "adapter: lora\nlora_r: 8\nlora_target_linear: true\nsequence_len: 512\n"

    def told(config: str) -> str:
        found, said, _ = answer(Fields(config=config, gpu="l40s"))
        assert said == ""
        return unescape(found).replace(path, "THE PATH")

    as_model = told(f"base_model: {path}\n{lora}")
    assert "'THE PATH' looks like a path, and files of the machine that answers are not read" in as_model
    beside = told(f"base_model: meta-llama/Llama-3.1-8B\ndeepspeed: {path}\n{lora}")
    assert "deepspeed names THE PATH, which is not found" in beside


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The address of `tunecast web`, run as a user would."""
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("gradio is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command_line = [sys.executable, "-m", "tunecast", "web", "--port", str(port)]
    process = subprocess.Popen(command_line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    address = f"http://127.0.0.1:{port}/"
    try:
        wait_until_it_answers(address, process)
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=30)


def wait_until_it_answers(address: str, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        assert process.poll() is None, process.communicate()[1]
        try:
            with urlopen(address, timeout=5) as reply:
                assert reply.status == 200
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the page did not open")


REFUSED_WITHIN_S = 2.0
"""A form that holds what its menus do not is refused at once."""
CUT = """return Array.from(document.querySelectorAll("#answer td, #answer svg text")).filter(function (e) {
  var b = e.getBoundingClientRect(); return b.width > 0 && b.right > window.innerWidth + 1;
}).map(function (e) { return e.textContent; });"""


@pytest.mark.skipif(DRIVER is None, reason="no ChromeDriver on this machine")
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser_a_link_shows_its_answer_and_the_button_asks_again(served: str, width: int) -> None:
    with browser(width) as page:
        page.open(served + link(ASKED))
        page.wait_for("document.querySelector('#answer table')")
        assert "1 x l40s-48gb" in page.run("return document.querySelector('#answer').innerText;")
        assert page.run("return document.querySelector('#link textarea').value;") == served + link(ASKED)
        assert page.run("return document.documentElement.scrollWidth - window.innerWidth;") <= 0
        assert page.run(CUT) == []
        page.open(served)
        page.wait_for("document.querySelector('#ask')")
        page.run("document.querySelector('#ask').click();")
        page.wait_for("document.querySelector('#answer table')")
        assert "Llama-3.1-8B: qlora" in page.run("return document.querySelector('#answer').innerText;")
        unnamed = page.run(
            "return Array.from(document.querySelectorAll('input, textarea')).filter(e => e.offsetParent && "
            "!e.labels.length && !e.ariaLabel && !e.closest('label, fieldset, [role]')).map(e => e.outerHTML);"
        )
        assert unnamed == []
        assert page.errors() == []


@pytest.mark.skipif(DRIVER is None, reason="no ChromeDriver on this machine")
def test_in_a_browser_short_names_and_a_file_open_as_forms_that_can_be_asked_again(served: str) -> None:
    with browser(1280) as page:
        for query in ("?gpu=l40s&tokens=2M", link(Fields(config=AXOLOTL, tokens="", gpu="l40s"))):
            page.open(served + query)
            page.wait_for("document.querySelector('#answer table')")
            page.run("document.querySelector('#ask').click();")
            time.sleep(REFUSED_WITHIN_S)
            assert "Error" not in page.run("return document.body.innerText;")
            page.wait_for("document.querySelector('#answer table')")
            shown = page.run("return document.querySelector('#command textarea').value;")
            assert "--gpu l40s" in shown
            assert ("--tokens" in shown) == ("tokens" in query)
            assert page.run("return document.body.innerText;").count("1 x l40s-48gb") >= 1
        assert page.errors() == []


def test_the_page_answers_over_its_interface(served: str) -> None:
    values = [getattr(ASKED, name) for name in Fields.__slots__]
    values[3] = ASKED.gpu.split(",")
    call = served + "gradio_api/call/forecast"
    body = json.dumps({"data": values}).encode()
    with urlopen(Request(call, body, {"Content-Type": "application/json"}), timeout=60) as reply:
        event = json.load(reply)["event_id"]
    with urlopen(f"{call}/{event}", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    assert "event: complete" in lines
    shown, said, how = json.loads(lines[lines.index("event: complete") + 1].removeprefix("data: "))
    assert shown == answer(ASKED)[0]
    assert (said, how) == (served + link(ASKED), command(ASKED))
