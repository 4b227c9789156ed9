"""The run of a forecast in one sentence, and of a table of cards what most of them run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunecast.tables import count

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast
    from tunecast.model.run import Run


def counts(forecasts: Sequence[Forecast]) -> set[int]:
    """Numbers of GPUs; they differ where the number was looked for."""
    return {forecast.run.num_gpus for forecast in forecasts}


def adapters_phrase(run: Run) -> str:
    """Rank and variants of the adapters, and what trains beside them."""
    variants = [word for word, on in (("DoRA", run.use_dora), ("rsLoRA", run.use_rslora)) if on]
    named = " ".join([f"r={run.lora_r}", *variants])
    beside = f" and {' and '.join(run.modules_to_save)} whole" if run.modules_to_save else ""
    return f", {named} on {len(run.lora_target_modules)} module kinds{beside}"


def method_words(run: Run) -> str:
    """The method; adapters on a base of 8 bits are no QLoRA, whatever the option is called."""
    bases = {"bnb-8bit": "int8", "gptq-8bit": "8-bit GPTQ", "gptq-4bit": "4-bit GPTQ"}
    base = bases.get(run.quant_method or "")
    return run.method if base is None else f"lora, {base} base"


def checkpointing_word(run: Run) -> str:
    """Whether layers are checkpointed or only their attention, how many of them, and where."""
    if not run.gradient_checkpointing:
        return "of attention alone" if run.recompute_attention else "off"
    some = f"1 of {run.checkpoint_every} layers" if run.checkpoint_every > 1 else "on"
    some = some if run.checkpoint_first is None else f"first {run.checkpoint_first} layers"
    return f"{some} in host memory" if run.activation_offloading else some


def layout_words(run: Run) -> str:
    """How several GPUs share the work: the sharding, and the degrees of the other kinds of parallelism."""
    degrees = [f"{name} {degree}" for name in ("tp", "pp", "cp") if (degree := getattr(run, name)) > 1]
    return ", ".join(degrees if degrees and run.sharding == "none" else [sharding_words(run), *degrees])


def sharding_words(run: Run) -> str:
    """The sharding, and over how many GPUs where those are not a machine's."""
    return f"{run.sharding} over {run.dp_shard_size}" if run.dp_shard_size else run.sharding


PAGED = "paged_bytes"
"""A note tells it."""
MANY = 3
"""Longer lists of a field are counted."""


def heading(forecasts: Sequence[Forecast]) -> str:
    """The run of a table of cards in one sentence: as most of them run it, with what the others assume instead."""
    return run_line(typical(forecasts), same_count=len(counts(forecasts)) == 1, beside=forecasts)


def typical(forecasts: Sequence[Forecast]) -> Forecast:
    """The first of those that assume what most cards do: without bf16 in hardware, a card runs fp16."""
    assumed = [tuple(fields_from(forecast, "assumed", same_count=True)) for forecast in forecasts]
    return forecasts[assumed.index(Counter(assumed).most_common(1)[0][0])]


def run_line(forecast: Forecast, *, same_count: bool = True, beside: Sequence[Forecast] = ()) -> str:
    """The run in one sentence, and which of its fields nobody chose; without the GPUs where they differ.

    Of what was assumed, cards `beside` that run something else are named with it.
    """
    run = forecast.run
    adapters = adapters_phrase(run) if run.has_adapters else ""
    gpus = f", {run.num_gpus} GPUs ({layout_words(run)})" if run.num_gpus > 1 and same_count else ""
    offload = "" if run.offload == "none" else f", offload {run.offload}"
    accumulated = f" x {run.gradient_accumulation_steps}" if run.gradient_accumulation_steps > 1 else ""
    guess = "".join(
        f" {words}: {', '.join(found)}."
        for words, origin in (("Chosen", "searched"), ("Assumed", "assumed"))
        if (found := fields_from(forecast, origin, same_count=same_count, beside=beside))
    )
    return (
        f"{forecast.model}: {method_words(run)}{adapters}, {run.per_device_train_batch_size} x {run.max_length} tokens"
        f"{accumulated}{gpus}{offload}, checkpointing {checkpointing_word(run)}, {run.stack}. "
        f"{count(forecast.trainable_params)} of {count(forecast.total_params)} parameters train.{guess}"
    )


def fields_from(forecast: Forecast, origin: str, *, same_count: bool, beside: Sequence[Forecast] = ()) -> list[str]:
    """Fields of the run that came from there, with their values, and what was assumed of the data.

    Without the GPUs where these differ. Of assumptions, those of cards `beside` that differ stand in brackets.
    """
    named = (name for name, found in forecast.run_origins.items() if found == origin)
    others = beside if origin == "assumed" else ()
    fields = [
        field_words(forecast, name) + differing(forecast, name, others)
        for name in named
        if name != PAGED and (same_count or name not in ("num_gpus", "sharding"))
    ]
    return [*fields, *(forecast.amount_assumed if origin == "assumed" else ())]


NO_OPTIONS = {"samples_unevenness": "samples whose mean square of lengths is {:.2f} times their squared mean"}
"""Fields that nobody types, in words."""


def field_words(forecast: Forecast, name: str) -> str:
    """A field of the run with its value; a long list by its length."""
    value = getattr(forecast.run, name)
    if name in NO_OPTIONS and value is not None:
        return NO_OPTIONS[name].format(value)
    if isinstance(value, bool):
        return f"{name} {'on' if value else 'off'}"
    if isinstance(value, tuple):
        return f"{name} {','.join(value)}" if len(value) <= MANY else f"{name} ({len(value)} kinds)"
    return f"{name} {value}"


def differing(forecast: Forecast, name: str, others: Sequence[Forecast]) -> str:
    """Other values of a field with the cards that have them: `` (fp16-autocast on t4-16gb)``."""
    cards: dict[str, list[str]] = {}
    for other in others:
        if getattr(other.run, name) != getattr(forecast.run, name):
            value = field_words(other, name).removeprefix(f"{name} ")
            cards.setdefault(value, []).append(other.gpu)
    found = "; ".join(f"{value} on {some(gpus)}" for value, gpus in cards.items())
    return f" ({found})" if found else ""


def some(names: Sequence[str]) -> str:
    """A few names and how many more."""
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
