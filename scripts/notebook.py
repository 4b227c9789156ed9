"""Make docs/notebook.ipynb: the Python functions, run, with what they show.

Run it in an environment that has tunecast, nbformat, nbclient and ipykernel: python scripts/notebook.py
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TARGET = Path(__file__).resolve().parent.parent / "docs" / "notebook.ipynb"
FIXED = {"SOURCE_DATE_EPOCH": "1795132800", "TUNECAST_CACHE_DIR": os.devnull}
"""As scripts/readme.py: prices that ship, and a fixed day."""
TEXT, CODE = "# %% text\n", "# %% code\n"
CELLS = """\
# %% text
# tunecast in a notebook

Forecasts need no GPU and no torch. Made by `scripts/notebook.py`.
# %% code
import tunecast

found = tunecast.estimate(
    "meta-llama/Llama-3.1-8B",
    method="qlora",
    max_length=2048,
    tokens="10M",
    gpu=["l40s", "rtx-4090", "a100-sxm4-80gb", "h100-sxm5-80gb"],
)
found
# %% text
The same as a pandas table; units are in the column names, intervals in `_low` and `_high`.
# %% code
table = found.to_frame().set_index("gpu")
table[["verdict", "process_gib", "step_time_s", "step_time_s_low", "step_time_s_high", "total_time_h", "cost_usd"]]
# %% text
One forecast: every number with its interval, and where it comes from.
# %% code
one = found[0]
print(one.gpu, one.verdict, one.step_time_s)
print(one.memory.peak_moment, {part: f"{size / 2**30:.2f} GiB" for part, size in one.memory.parts_bytes.items()})
for note in one.notes:
    print("-", note)
# %% text
A loop over inputs.
# %% code
import pandas as pd

rows = []
for length in (512, 1024, 2048, 4096):
    for method in ("lora", "qlora"):
        (one,) = tunecast.estimate("Qwen/Qwen2.5-7B", method=method, max_length=length, gpu="rtx-4090")
        speed = round(one.tokens_per_s.value)
        rows.append({"length": length, "method": method, "verdict": one.verdict, "tokens/s": speed})
pd.DataFrame(rows).pivot(index="length", columns="method", values=["verdict", "tokens/s"])
# %% text
What to rent.
# %% code
answer = tunecast.recommend(
    "meta-llama/Llama-3.1-8B", method="qlora", max_length=2048, tokens="10M", gpu=["l40s", "h100-sxm5-80gb"]
)
for name in ("cheapest", "balance", "fastest"):
    forecast = getattr(answer, name).forecast
    hours, usd = forecast.total_time_h.value, forecast.cost_usd.value
    print(f"{name}: {forecast.run.num_gpus} x {forecast.gpu}, {hours:.2f} h, ${usd:.2f}")
"""


def cells() -> list[nbformat.NotebookNode]:
    """Text and code in turn, each with a name of its own."""
    made = []
    for part in CELLS.split(TEXT)[1:]:
        text, code = part.split(CODE)
        made += [nbformat.v4.new_markdown_cell(text.strip()), nbformat.v4.new_code_cell(code.strip())]
    for number, cell in enumerate(made):
        cell["id"] = f"cell-{number}"
    return made


def notebook() -> nbformat.NotebookNode:
    """The cells, run."""
    made = nbformat.v4.new_notebook()
    made.cells = cells()
    os.environ.update(FIXED)
    NotebookClient(made, kernel_name="python3", timeout=300, record_timing=False).execute()
    made.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return made


if __name__ == "__main__":
    TARGET.write_text(nbformat.writes(notebook()) + "\n", encoding="utf-8")
