"""The Gradio page."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tunecast.catalogs.errors import TunecastError
from tunecast.web.answer import answer, refused
from tunecast.web.asked import Fields, from_query

TITLE = "tunecast: does it fit, how long, how much?"
ABOUT = (
    "Forecast a fine-tuning run on every GPU you could rent, with 80% intervals and the origin of every number. "
    "Measure a card with `tunecast calibrate` for narrower ones."
)
METHODS = ["lora", "qlora", "full"]
AMOUNT_OF_A_FILE = f"(file, tokens) => file.trim() && tokens === {Fields().tokens!r} ? '' : tokens"
"""A pasted file says its amount itself: what was in the field before goes, what was typed stays."""


def import_gradio() -> Any:
    """Gradio, or one sentence that says how to get it."""
    try:
        import gradio
    except ImportError as error:
        raise TunecastError(
            "The page needs gradio, which is not installed; run `pip install 'tunecast[web]'`."
        ) from error
    return gradio


def build() -> Any:
    """The page as a ``gradio.Blocks``, for `tunecast web` and for a Hugging Face Space."""
    gradio = import_gradio()
    from tunecast.catalogs.gpus import load_gpus
    from tunecast.catalogs.models import load_models

    usual = Fields()
    with gradio.Blocks(title=TITLE, analytics_enabled=False) as page:
        gradio.Markdown(f"# {TITLE}\n{ABOUT}")
        with gradio.Row():
            with gradio.Column(scale=1):
                model = gradio.Dropdown(
                    sorted(load_models()), value=usual.model, label="Model", allow_custom_value=True,
                    info="a catalog model; any other name is looked up on the hub where there is a network",
                )  # fmt: skip
                method = gradio.Radio(METHODS, value=usual.method, label="Method")
                gpu = gradio.Dropdown(
                    sorted(load_gpus()),
                    value=[],
                    label="GPUs",
                    multiselect=True,
                    info="none: all",
                    allow_custom_value=True,
                )
                with gradio.Row():
                    num_gpus = gradio.Textbox(usual.num_gpus, label="GPUs of the job", placeholder="1, 8 or auto")
                    max_length = gradio.Textbox(usual.max_length, label="Tokens per sample")
                with gradio.Row():
                    batch = gradio.Textbox(usual.batch, label="Micro-batch")
                    accumulation = gradio.Textbox(usual.accumulation, label="Accumulation", placeholder="1")
                checkpointing = gradio.Checkbox(usual.checkpointing, label="Gradient checkpointing")
                with gradio.Row():
                    tokens = gradio.Textbox(usual.tokens, label="Tokens of the run", placeholder="10M")
                    usd = gradio.Textbox(usual.usd_per_gpu_hour, label="USD per GPU-hour", placeholder="as offered")
                with gradio.Accordion("Or paste a training file of one of five frameworks", open=False):
                    config = gradio.Code(value="", language="yaml", label="Training file")
                ask = gradio.Button("Forecast", variant="primary", elem_id="ask")
            with gradio.Column(scale=2):
                out = gradio.HTML(elem_id="answer")
                said = gradio.Textbox(label="Link with these inputs", interactive=False, elem_id="link")
                how = gradio.Textbox(label="The same on the command line", interactive=False, elem_id="command")
        form = [model, config, method, gpu, num_gpus, max_length, batch, accumulation, checkpointing, tokens, usd]
        assert len(form) == len(fields(Fields))
        config.input(None, inputs=[config, tokens], outputs=tokens, js=AMOUNT_OF_A_FILE)
        ask.click(submitted_with(gradio), inputs=form, outputs=[out, said, how], api_name="forecast")
        page.load(opened_with(gradio), inputs=None, outputs=[*form, out, said, how], api_name=False)
    return page


def submitted_with(gradio: Any) -> Any:
    """What the button does: the form's values, in the order of `Fields`, to (HTML, link, command)."""

    def submitted(request: Any, *values: Any) -> tuple[str, str, str]:
        return with_address(request, answer(fields_of(*values)))

    submitted.__annotations__["request"] = gradio.Request
    return submitted


def with_address(request: Any, answered: tuple[str, str, str]) -> tuple[str, str, str]:
    """The answer with its link made whole, so that it can be pasted anywhere."""
    shown, query, how = answered
    return shown, page_address(request) + query if query.startswith("?") else query, how


def page_address(request: Any) -> str:
    """Where the visitor's browser has the page: as it says itself, else as the server was called."""
    headers = {} if request is None else request.headers
    page = str(headers.get("referer") or "").partition("#")[0].partition("?")[0]
    host = headers.get("host")
    return page or (f"{headers.get('x-forwarded-proto') or 'http'}://{host}/" if host else "")


def fields_of(*values: Any) -> Fields:
    """Form values as fields: lists of GPUs become text, None becomes empty."""
    said: dict[str, Any] = {}
    for field, value in zip(fields(Fields), values, strict=True):
        if isinstance(value, bool):
            said[field.name] = value
        else:
            said[field.name] = ",".join(value) if isinstance(value, list) else str(value or "")
    return Fields(**said)


def form_values(asked: Fields) -> list[Any]:
    """Fields as the form's parts take them; a method that is not among the choices is none of them."""
    values = {field.name: getattr(asked, field.name) for field in fields(Fields)}
    values["gpu"] = [name for name in asked.gpu.split(",") if name]
    values["method"] = asked.method if asked.method in METHODS else None
    return list(values.values())


def opened_with(gradio: Any) -> Any:
    """What happens when the page opens: the form as its link says, and its answer if the link says anything."""

    def opened(request: Any) -> list[Any]:
        query = dict(request.query_params) if request is not None else {}
        try:
            asked = from_query(query)
        except TunecastError as error:
            return [*form_values(Fields()), refused(error), "", ""]
        return [*form_values(asked), *(with_address(request, answer(asked)) if query else ("", "", ""))]

    opened.__annotations__["request"] = gradio.Request
    return opened
