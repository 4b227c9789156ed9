"""What one GPU holds while its process loads a model that several GPUs are to share.

transformers 5 puts a base that bitsandbytes quantizes on the process's own card, whole: no ``device_map`` becomes that
card (``update_device_map`` of quantizers/quantizer_bnb_4bit.py and quantizer_bnb_8bit.py), ZeRO-3's own loading leaves
quantized models out (``is_deepspeed_zero3_enabled() and not is_quantized``, modeling_utils.py), and
core_model_loading.py knows no FSDP. FSDP and ZeRO-3 share it out afterwards ("VRAM spike", accelerate
utils/fsdp_utils.py), so that a card that holds its share may not hold the model that it is cut from. Before version 5
FSDP's first process of a machine loaded it in host memory (``_load_state_dict_into_meta_model`` of 4.49), and so does
axolotl under FSDP (``fsdp_config.cpu_ram_efficient_loading``, loaders/model.py of 0.19; without it every process has a
quantized base whole). A base in 16 bits is loaded in host memory under FSDP, and in shares under ZeRO-3, but by
LLaMA-Factory whole on every card where its own file alone asks for FSDP: transformers hears of it when its model is
there (``device_map`` of hparams/parser.py and model/patcher.py of 0.9.5). Files that do so set ``loads_on_gpu``.

Left out: the 16-bit copies of the few weights that are being quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tunecast.model.architecture import Architecture
from tunecast.model.memory_static import static_parts
from tunecast.model.resolve_parallel import FSDP
from tunecast.model.run import Run
from tunecast.model.sharding import shards_of
from tunecast.model.units import gib

LOADERS = ("hf-peft", "trl", "liger", "axolotl", "llama-factory", "ms-swift")
"""Stacks whose models ``from_pretrained`` of transformers loads."""
OF_HOST = ("axolotl",)
"""Of these, who loads in host memory under FSDP."""
LOADED = ("weights", "quantized", "adapters")


def loads_whole(run: Run) -> bool:
    """Whether every process has the whole base on its card before GPUs share it."""
    if run.num_gpus == 1 or not shards_of(run).weights:
        return False
    if run.loads_on_gpu is not None:
        return run.loads_on_gpu
    if run.base_quantization is None or not run.base_quantization.startswith("bnb"):
        return False
    if run.stack not in LOADERS or run.hf_code != "5":
        return False
    return not (run.stack in OF_HOST and run.sharding in FSDP)


def loading_parts(architecture: Architecture, run: Run) -> Mapping[str, int]:
    """Bytes on one GPU when everything is loaded and nothing is shared yet, by part; empty where that never is."""
    if not loads_whole(run):
        return {}
    parts = static_parts(architecture, replace(run, sharding="none", num_gpus=1, master_dtype=None))
    return {part: parts[part] for part in LOADED}


def loading_notes(architecture: Architecture, run: Run, peak_moment: str) -> tuple[str, ...]:
    """That loading decides how much memory a run needs."""
    parts = loading_parts(architecture, run)
    if not parts or peak_moment != "load":
        return ()
    whole = f"{gib(sum(parts.values())):.1f} GiB"
    if run.loads_on_gpu:
        told = (
            f"the peak is that of loading: every GPU has the whole base ({whole}) before {run.sharding} shares it; "
            "--no-loads-on-gpu is a loader that keeps it in host memory (axolotl with cpu_ram_efficient_loading: true, "
            "LLaMA-Factory by accelerate launch with an FSDP file)"
        )
        return (told,)
    told = (
        f"the peak is that of loading: transformers 5 puts the whole quantized base ({whole}) on every GPU before "
        f"{run.sharding} shares it; --no-loads-on-gpu is a loader that keeps it in host memory under FSDP: axolotl's "
        "(--stack axolotl), or transformers 4 (--hf-code 4.49)"
    )
    return (told,)
