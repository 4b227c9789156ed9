"""The phases of a run around its training: how much each has to move or do, at which rate, for how long.

Every phase is one small function of `Work` (amounts, computed once per run), `Rates` and the options.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tunecast.catalogs.errors import InputError
from tunecast.model.factors import Factor
from tunecast.model.phase import Phase, Work, at_rates, fixed, gigabytes, moved_h
from tunecast.model.phase_rates import Rates
from tunecast.model.units import GIGA, HOUR_S, MEGA, MINUTE_S, SIXTEEN_BITS
from tunecast.model.value import Value, exact, product, total
from tunecast.model.whole_run_options import MACHINE_PHASES, WholeRunOptions

Builder = Callable[[Work, Value, Rates, WholeRunOptions], Phase | None]


def start(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase | None:
    """From the request to a shell; nothing to wait for on a machine of one's own."""
    return None if options.owned or work.on_cpu else fixed("start")


def setup(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase | None:
    """Packages or image."""
    return None if options.owned or work.on_cpu else fixed("setup")


def download(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase | None:
    """Checkpoint bytes over the network rate; several machines download at the same time."""
    if options.from_scratch:
        return None
    return at_rates(
        "download", [(work.download_bytes, "network_mb_per_s")], rates, f"{gigabytes(work.download_bytes)} of weights"
    )


def dataset_bytes(work: Work, rates: Rates, options: WholeRunOptions) -> float:
    """Bytes of text of one epoch: as given, else tokens times assumed bytes per token."""
    if options.dataset_gb is not None:
        return options.dataset_gb * GIGA
    return work.dataset_tokens * rates["text_bytes_per_token"].value


def prepare(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase | None:
    """Read, tokenize and write the data once, batch by batch.

    Reading and tokenizing overlap, so the slower of the two counts; writing follows. Data larger than the
    host's memory are shuffled through the disk: written and read once more. From another machine the result
    travels over the network.
    """
    if not (options.prepare or options.dataset_gb is not None or options.data_location is not None):
        return None
    text_bytes = dataset_bytes(work, rates, options)
    known = dict(rates)
    source = "disk_read_mb_per_s"
    if options.data_location is not None:
        place, mb_per_s = options.data_location
        source = f"{place}_mb_per_s"
        number = mb_per_s * MEGA
        known[source] = Factor(value=number, low=number, high=number, unit="B/s", origin="cli")
    tokens = text_bytes / rates["text_bytes_per_token"].value
    written = tokens * rates["tokenized_bytes_per_token"].value
    reading_s, tokenizing_s = text_bytes / known[source].value, tokens / rates["tokenize_tokens_per_s"].value
    slower = (text_bytes, source) if reading_s >= tokenizing_s else (tokens, "tokenize_tokens_per_s")
    ram_bytes = rates["host_ram_gb"].value * GIGA
    spilled = text_bytes if text_bytes > ram_bytes else 0.0
    moved = written if "prepare" in options.phase_machine else 0.0
    batches = max(1, math.ceil(text_bytes / ram_bytes))
    bound = "reading" if slower[1] == source else "tokenizing"
    parts = [
        slower,
        (written + spilled, "disk_write_mb_per_s"),
        (spilled, "disk_read_mb_per_s"),
        (moved, "network_mb_per_s"),
    ]
    how = f"{gigabytes(text_bytes)} of text in {batches} batch{'es' if batches > 1 else ''}, bound by {bound}"
    return at_rates("prepare", parts, known, how)


def load(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase | None:
    """Checkpoint from a cold disk to the device, quantized on the way.

    Where a record has it, file to device in one measured rate; else disk, then copy, then quantization.
    Every GPU has a PCIe link of its own and the disk is read once. Once per trial and repeat.
    """
    if options.from_scratch:
        return None
    times = options.starts
    n_bytes = work.download_bytes * times
    how = f"{gigabytes(work.download_bytes)}{', quantized to 4 bits' if work.quantized else ''}{_times(times)}"
    measured = "load_quantized_mb_per_s" if work.quantized else "load_plain_mb_per_s"
    if measured in rates:
        return at_rates("load", [(n_bytes, measured)], rates, how)
    quantize = "quantize_cpu_mb_per_s" if work.on_cpu else "quantize_gpu_mb_per_s"
    parts = [
        (n_bytes, "disk_read_mb_per_s"),
        (0.0 if work.on_cpu else n_bytes, "copy_mb_per_s"),
        (n_bytes if work.quantized else 0.0, quantize),
    ]
    return at_rates("load", parts, rates, how)


def compile_step(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase | None:
    """torch.compile, once per start of the training process, where the stack compiles."""
    return fixed("compile", options.starts) if work.compiles else None


def full_runs(options: WholeRunOptions) -> float:
    """Training in units of one full run: the best trial in full, the others up to where they are stopped; repeated."""
    return options.repeats * (1.0 + (options.trials - 1) * options.early_stopping_fraction)


def train(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase:
    """Steps, as full as they are, times the forecast step time; what is assumed of the data counts in the interval as
    an error of its own."""
    times = full_runs(options)
    how = f"{work.steps:,} step{'' if work.steps == 1 else 's'}{_times(times)}"
    hours = step_s.scaled(work.steps * work.full_frac * times / HOUR_S)
    if work.least < work.most:
        hours = product(hours, Value(value=1.0, low=work.least, high=work.most))
    return Phase(name="train", hours=hours, origin="forecast", how=how)


def evaluations(work: Work, options: WholeRunOptions) -> int:
    """How often one run evaluates: every ``eval_steps``, or once at its end."""
    return 1 if options.eval_steps is None else max(work.steps // options.eval_steps, 1)


def evaluate(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase | None:
    """Forward passes over the evaluation set: its padded tokens at the forward share of a training step's time.

    On another machine one GPU of the same kind does it.
    """
    if options.eval_samples is None:
        return None
    samples_per_step = work.tokens_per_step / work.max_length * work.samples_per_row
    runs = full_runs(options) if options.eval_steps is not None else options.starts
    times = evaluations(work, options) * runs  # at its end every trial is scored, those that stop early too
    alone = work.num_gpus if "evaluate" in options.phase_machine else 1
    steps = options.eval_samples / samples_per_step * times * alone
    packed = f", {work.samples_per_row:.3g} to a row" if work.samples_per_row > 1.0 else ""
    told = f"{options.eval_samples:,.0f} samples{packed}{_times(times)}"
    how = f"{told}, forward only: {work.forward_frac:.0%} of a step's time"
    return Phase(name="evaluate", hours=step_s.scaled(steps * work.forward_frac / HOUR_S), origin="forecast", how=how)


def save_parts(n_bytes: float, work: Work, rates: Rates) -> list[tuple[float, str]]:
    """Device to host, then to the disk; training waits. A record's own trial of an adapter's save comes first.

    That trial does not wait for the disk, as PEFT does not; a whole model does not fit the page cache.
    """
    if work.adapters and "checkpoint_mb_per_s" in rates:
        return [(n_bytes, "checkpoint_mb_per_s")]
    return [(0.0 if work.on_cpu else n_bytes, "copy_mb_per_s"), (n_bytes, "disk_write_mb_per_s")]


def checkpoint_parts(count: float, work: Work, rates: Rates) -> list[tuple[float, str]]:
    """Checkpoints with the optimizer's state, of which every GPU with a share copies its own."""
    parts = save_parts(count * work.checkpoint_bytes, work, rates)
    return [(amount / (work.writers if name == "copy_mb_per_s" else 1), name) for amount, name in parts]


def written_together(work: Work, rates: Rates) -> Rates:
    """The rates of a checkpoint: of several machines, anything between one volume that all write to and a disk in each.

    A rate that is given is that of the job.
    """
    rate = rates["disk_write_mb_per_s"]
    if work.machines == 1 or rate.origin == "cli":
        return rates
    spread = replace(rate, value=rate.value * math.sqrt(work.machines), high=rate.high * work.machines)
    return {**rates, "disk_write_mb_per_s": spread}


def one_save_h(work: Work, rates: Rates) -> Value:
    """One checkpoint with the optimizer's state."""
    together = written_together(work, rates)
    return total(moved_h(amount, together[name]) for amount, name in checkpoint_parts(1.0, work, rates) if amount)


def saves_of_one(work: Work, options: WholeRunOptions) -> int:
    """Checkpoints of one full run by ``save_steps``, the last at the end (``DefaultFlowCallback.on_step_end``)."""
    return 0 if options.save_steps is None else -(-work.steps // options.save_steps)


def saves_asked(work: Work, options: WholeRunOptions) -> float:
    """Checkpoints that ``save_steps`` asks for in all runs."""
    return saves_of_one(work, options) * full_runs(options)


def kept_checkpoints(work: Work, options: WholeRunOptions) -> float:
    """Checkpoints on the disk at the end: those asked for, up to ``save_total_limit`` of every run
    and trial; against interruptions one."""
    if options.save_steps is None:
        return 1.0 if options.spot else 0.0
    limit = math.inf if options.save_total_limit is None else options.save_total_limit
    of_one = saves_of_one(work, options)
    stopped = min(of_one * options.early_stopping_fraction, limit)
    return options.repeats * (min(of_one, limit) + (options.trials - 1) * stopped)


def checkpoints(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase | None:
    """A checkpoint every ``save_steps``; those against interruptions are counted in `interrupted`."""
    if options.save_steps is None or options.spot:
        return None
    count = saves_asked(work, options)
    apart = f", one volume to {work.machines:,} disks" if work.machines > 1 else ""
    how = f"{count:,.0f} x {gigabytes(work.checkpoint_bytes)}{apart}"
    return at_rates("checkpoints", checkpoint_parts(count, work, rates), written_together(work, rates), how)


def save(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase | None:
    """The final model: adapter, or all weights."""
    n_bytes = work.model_bytes * options.repeats
    how = gigabytes(work.model_bytes) + _times(options.repeats)
    return at_rates("save", save_parts(n_bytes, work, rates), rates, how)


def merges(work: Work, options: WholeRunOptions) -> bool:
    """Whether an adapter is merged: when asked, or when the model is exported; a whole model has none."""
    return work.adapters and (options.merge or options.export is not None)


def merge(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase | None:
    """Read the base, add the adapter, write it in 16 bits; another machine downloads the base first."""
    if not merges(work, options):
        return None
    elsewhere = work.download_bytes if _elsewhere("merge", options) is not None else 0.0
    parts = [
        (elsewhere, "network_mb_per_s"),
        (work.download_bytes, "disk_read_mb_per_s"),
        (work.merged_bytes, "disk_write_mb_per_s"),
    ]
    return at_rates("merge", parts, rates, f"{gigabytes(work.merged_bytes)} in 16 bits")


def exported_bytes(work: Work, options: WholeRunOptions) -> float:
    """The exported file."""
    return work.merged_bytes if options.export in SIXTEEN_BITS else work.exports[str(options.export)]


def export(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase | None:
    """Read the merged model and write it in the format asked for; bound by the disk."""
    if options.export is None:
        return None
    written = exported_bytes(work, options)
    parts = [(work.merged_bytes, "disk_read_mb_per_s"), (written, "disk_write_mb_per_s")]
    return at_rates("export", parts, rates, f"{gigabytes(written)} as {options.export}")


def uploaded_bytes(work: Work, options: WholeRunOptions) -> float:
    """What leaves the machine: the export, else the merged model, else what was saved; 0 without an upload."""
    if not options.upload:
        return 0.0
    if options.export is not None:
        return exported_bytes(work, options)
    return work.merged_bytes if merges(work, options) else work.model_bytes


def upload(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> Phase | None:
    """What was made, over the network."""
    n_bytes = uploaded_bytes(work, options)
    return at_rates("upload", [(n_bytes, "upload_mb_per_s")], rates, gigabytes(n_bytes)) if n_bytes else None


BUILDERS: dict[str, Builder] = {
    "start": start,
    "setup": setup,
    "download": download,
    "prepare": prepare,
    "load": load,
    "compile": compile_step,
    "train": train,
    "evaluate": evaluate,
    "checkpoints": checkpoints,
    "save": save,
    "merge": merge,
    "export": export,
    "upload": upload,
}


def phases_of(work: Work, step_s: Value, rates: Rates, options: WholeRunOptions) -> tuple[Phase, ...]:
    """Every phase of the run in order, its own minutes and machines applied; only training with ``train_only``."""
    if options.from_scratch and work.adapters:
        raise InputError(
            "--from-scratch trains weights that are drawn at random, which adapters leave as they are; add --method "
            "full, or leave it out."
        )
    if options.train_only:
        return (train(work, step_s, rates, options),)
    found = []
    for name, builder in BUILDERS.items():
        phase = _overridden(name, builder, work, step_s, rates, options)
        if phase is not None:
            found.append(phase)
    return tuple(found)


def _overridden(
    name: str, builder: Builder, work: Work, step_s: Value, rates: Rates, options: WholeRunOptions
) -> Phase | None:
    minutes = options.phase_min.get(name)
    machine = _elsewhere(name, options)
    if minutes is not None:
        given = Phase(name=name, hours=exact(minutes * MINUTE_S / HOUR_S), origin="cli", usd_per_h=machine)
        return given if minutes > 0.0 else None
    phase = builder(work, step_s, rates, options)
    if phase is None or machine is None:
        return phase
    return Phase(name=name, hours=phase.hours, rates=phase.rates, origin=phase.origin, how=phase.how, usd_per_h=machine)


def _elsewhere(name: str, options: WholeRunOptions) -> float | None:
    """USD per hour of another machine that does this phase; the phase's own name before ``deploy``."""
    if name in options.phase_machine:
        return options.phase_machine[name]
    for group, members in MACHINE_PHASES.items():
        if name in members and group in options.phase_machine:
            return options.phase_machine[group]
    return None


def _times(count: float) -> str:
    return "" if count == 1 else f" x {count:g}"
