"""Options about everything around training: phases, machines, billing, interruptions.

The same names serve ``estimate`` and the commands on top of it; `model.whole_run_options` reads them.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import typer

from tunecast.cli.options import Group, option

WHOLE_RUN_PANEL = "The whole run"
MONEY_PANEL = "Money"
SPOT_PANEL = "Interruptible machines"

_phase = functools.partial(option, panel=WHOLE_RUN_PANEL)
_money = functools.partial(option, panel=MONEY_PANEL)
_spot = functools.partial(option, panel=SPOT_PANEL)


def _switch(help_text: str, name: str, panel: str) -> Any:
    """A flag that is off unless it is given."""
    return Annotated[bool, typer.Option(name, help=help_text, rich_help_panel=panel)]


DEADLINE: Group = {
    "deadline": option(str, "When the run must be done (--num-gpus auto).", panel=WHOLE_RUN_PANEL, metavar="24h|3d"),
}
WHOLE_RUN: Group = {
    "train_only": _switch("Count the training alone.", "--train-only", WHOLE_RUN_PANEL),
    "from_scratch": _switch("Random weights: no download, no load.", "--from-scratch", WHOLE_RUN_PANEL),
    "prepare": _switch("Count reading and tokenizing the data.", "--prepare", WHOLE_RUN_PANEL),
    "dataset_gb": _phase(float, "Text of one epoch, in GB (counts --prepare).", metavar="X"),
    "data_location": _phase(str, "Where the data lie and MB/s from there (counts --prepare).", metavar="NAME=X"),
    "eval_samples": _phase(str, "Samples of one evaluation.", metavar="N"),
    "eval_steps": _phase(int, "Steps between evaluations. Default: one at the end.", metavar="N"),
    "save_steps": _phase(int, "Steps between checkpoints with optimizer state.", metavar="N"),
    "save_total_limit": _phase(int, "Checkpoints kept on the disk. Default: all.", metavar="N"),
    "merge": _switch("Merge the adapter into the base, in 16 bits.", "--merge", WHOLE_RUN_PANEL),
    "export": _phase(str, "Write the model in another format.", metavar="fp16|bf16|q8|q6|q5|q4"),
    "upload": _switch("Upload what was made.", "--upload", WHOLE_RUN_PANEL),
    "trials": _phase(int, "Runs of a hyper-parameter search, one after another.", metavar="N"),
    "early_stopping_fraction": _phase(float, "Mean share of its steps that a trial but the best runs.", metavar="X"),
    "repeats": _phase(int, "How often everything is repeated, for example with other seeds.", metavar="N"),
    "phase_min": _phase(list[str], "Minutes of a phase, 0 to leave it out; repeatable.", metavar="NAME=X"),
    "phase_rate": _phase(list[str], "A rate, as network_mb_per_s=500; repeatable.", metavar="NAME=X"),
    "phase_machine": _phase(
        list[str],
        "USD/h of another machine for prepare, evaluate, merge, export or deploy; repeatable.",
        metavar="NAME=X",
    ),
    "billing_granularity_s": _money(float, "Time is paid in multiples of this.", metavar="X"),
    "billing_minimum_s": _money(float, "Least time that is paid.", metavar="X"),
    "storage_usd_per_gb_month": _money(float, "Price of the disk.", metavar="X"),
    "keep_days": _money(float, "Days for which the disk is kept afterwards.", metavar="X"),
    "egress_usd_per_gb": _money(float, "Price of what is uploaded.", metavar="X"),
    "owned": _switch("Machines of your own: electricity instead of rent.", "--owned", MONEY_PANEL),
    "electricity_usd_per_kwh": _money(float, "Price of electricity (--owned).", metavar="X"),
    "gpu_power_w": _money(float, "Watts of one GPU while it trains (--owned).", metavar="X"),
    "pue": _money(float, "Power of the building over that of its machines (--owned).", metavar="X"),
    "spot": _switch("Interruptible offers, with what interruptions cost.", "--spot", SPOT_PANEL),
    "interruption_rate_per_month": _spot(float, "Share of machines interrupted in a month.", metavar="X"),
    "checkpoint_interval_min": _spot(str, "Minutes between checkpoints. Default: auto.", metavar="X|auto|none"),
    "restart_min": _spot(float, "From an interruption to the next step. Default: the start-up.", metavar="X"),
    "seed": _spot(int, "Of the simulation of interruptions.", metavar="N"),
}
