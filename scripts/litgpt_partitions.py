"""What a compiled block of LitGPT keeps for its backward, by torch's own partitioner; for the tests of the formulas.

    python -m pip install --no-deps --target DIR litgpt==0.5.12 lightning lightning-utilities jsonargparse torchmetrics
    PYTHONPATH=DIR python scripts/litgpt_partitions.py

litgpt pins packages that the rest of this project does not go with, so it is installed beside them, without
dependencies. Nothing is compiled: AOTAutograd traces forward and backward of the real block on the CPU, and the
partitioner says which tensors the one hands to the other. Views of one memory count once, weights and rotary tables
not. Figures go to tests/fixtures/litgpt_partitions.json.
"""

from __future__ import annotations

import json
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "litgpt_partitions.json"
BATCH, LENGTH = 3, 512
SHAPE: dict[str, Any] = {"n_layer": 3, "n_head": 8, "n_embd": 256, "padded_vocab_size": 1024, "block_size": 4096}
LLAMA = {"rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm",
         "mlp_class_name": "LLaMAMLP", "intermediate_size": 768}  # fmt: skip
LAYER_NORM = {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "intermediate_size": 1024, "bias": True}
BLOCKS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "n_query_groups": 8},
    "llama-gqa": {**LLAMA, "n_query_groups": 2},
    "qwen3": {**LLAMA, "n_query_groups": 2, "norm_qk": True},
    "gemma": {**LLAMA, "n_query_groups": 1, "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh"},
    "pythia": {**LAYER_NORM, "rotary_percentage": 0.25, "parallel_residual": True},
    "stablelm": {**LAYER_NORM, "rotary_percentage": 0.25, "parallel_residual": False},
}


def kept(options: dict[str, Any]) -> dict[str, int]:
    """Bytes of the tensors that the block's forward hands to its backward, each memory once; and of the attention's
    result where it is the memory of its rows side by side: CUDA's kernels lay it out as their queries, so there the
    rows are a copy."""
    import torch
    from litgpt.config import Config
    from litgpt.model import Block, build_rope_cache
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    config = Config(name="small", **SHAPE, **options)
    block = Block(config, 0).to(torch.bfloat16)
    cos, sin = (table.to(torch.bfloat16)[None] for table in build_rope_cache(LENGTH, config.rope_n_elem))
    x = torch.zeros(BATCH, LENGTH, config.n_embd, dtype=torch.bfloat16, requires_grad=True)
    found: dict[int, int] = {}
    shared: list[int] = []

    def forward(graph: Any, _: Any) -> Any:
        (outputs,) = graph.graph.find_nodes(op="output")
        for node in outputs.args[0][1:]:
            value = getattr(node, "meta", {}).get("val")
            if value is not None and value.dim() > 1 and value.shape[0] in (BATCH, BATCH * LENGTH):
                storage = value.untyped_storage()
                same = storage._cdata in found
                found[storage._cdata] = storage.nbytes()
                shared.append(storage.nbytes() if same and node.target is torch.ops.aten.alias.default else 0)
        return graph.forward

    torch._dynamo.reset()
    cut = partial(min_cut_rematerialization_partition, compiler="inductor")
    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: graph.forward,
        partition_fn=cut,
        decompositions=select_decomp_table(),
    )
    torch.compile(lambda given: block(given, cos, sin), backend=backend, fullgraph=True, dynamic=False)(
        x
    ).sum().backward()
    return {"kept_bytes": sum(found.values()), "attention_in_place_bytes": sum(shared)}


def main() -> None:
    """Write what every block keeps."""
    cases = [{"name": name, "options": options, **kept(options)} for name, options in BLOCKS.items()]
    made = {"made_by": "scripts/litgpt_partitions.py", "litgpt": version("litgpt"), "torch": version("torch")}
    shape = {**SHAPE, "batch": BATCH, "length": LENGTH}
    OUT.write_text(json.dumps({**made, "shape": shape, "blocks": cases}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
