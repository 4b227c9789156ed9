#!/usr/bin/env python3
"""How long Python takes for an adapter's matrix that is a unit of FSDP 1, on this CPU: the belief ``host_units``.

    python scripts/fsdp_visits.py

A small Llama with LoRA under FSDP 1, its layers as units and its adapters' matrices too or not, with collectives that
do nothing (torch's fake process group): what the one takes longer than the other, over the units.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import time
import warnings
from typing import Any

LAYERS, TARGETS, TIMES, WARM = 16, ("q_proj", "k_proj", "v_proj", "o_proj"), 15, 3
UNITS = LAYERS * len(TARGETS) * 2


def built(*, leaves: bool) -> Any:
    """The model under FSDP, by PEFT's policy or by layers alone."""
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=500
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules=list(TARGETS)))
    policy = fsdp_auto_wrap_policy(model) if leaves else ModuleWrapPolicy({LlamaDecoderLayer})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def passes_s(model: Any) -> tuple[float, float]:
    """Median seconds of a forward and of a backward."""
    import torch

    tokens = torch.zeros((1, 8), dtype=torch.long)
    forward, backward = [], []
    for _ in range(TIMES):
        begun = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        between = time.perf_counter()
        loss.backward()
        forward.append(between - begun)
        backward.append(time.perf_counter() - between)
        model.zero_grad()
    return statistics.median(forward[WARM:]), statistics.median(backward[WARM:])


def main() -> None:
    """Print microseconds for a unit."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with contextlib.redirect_stdout(io.StringIO()):
        alone, units = (passes_s(built(leaves=leaves)) for leaves in (False, True))
    for name, without, with_them in zip(("forward", "backward"), alone, units, strict=True):
        print(f"{name}: {(with_them - without) / UNITS * 1e6:.0f} us for a unit")


if __name__ == "__main__":
    main()
