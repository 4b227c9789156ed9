"""What options are called elsewhere: in Transformers' and TRL's arguments, axolotl, LLaMA-Factory, torchtune, Megatron,
DeepSpeed, Accelerate and torchrun.

Only what is typed instead comes from here; no option is read under another name than its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container

ELSEWHERE = {
    "max_length": r"((max_?|model_max_)?(seq(uence)?_?)?(len(gth)?)|seq(uence)?)|max_(tokens|position_embeddings)"
    r"|(cutoff|context|ctx)_(len(gth)?|size|window)|context|block_size|n_ctx",
    "per_device_train_batch_size": r"((per_(device|gpu)|device|gpu|local|train|micro)_)*(batch|bsz?)(_size)?"
    r"(_per_(gpu|device))?|mbs|b|micro_?batch(_size)?",
    "gradient_accumulation_steps": r"(grad(ient)?s?_)?accum(ulation)?(_steps?)?|accumulate_grad_batches|ga|gas",
    "global_batch": r"(global|total|effective)_(train_)?(batch|bsz?)(_size)?|gbs",
    "num_gpus": r"(n|num|number_of|total)_?(gpus?|devices|processes|ranks)|gpu_count|ngpus?|gpus|devices|world_size"
    r"|n_?proc(_per_node)?|num_?proc(s|esses)?",
    "gpus_per_node": r"(n|num_)?(gpus?|devices?)_per_(machine|host|instance)",
    "gpu": r"(gpu|device|accelerator|hardware)_?(type|name|model|kind)|card|accelerator|hardware|device",
    "device": r"gpu|cuda|device_name",
    "num_train_epochs": r"((n|num|max|total|train)_)?epochs?",
    "max_steps": r"((n|num|total|train(ing)?|max|optimizer)_)*(steps|iters|iterations|updates)|max_steps_per_epoch",
    "num_samples": r"((n|num|max|train|total|dataset)_)*(samples|examples|rows|sequences)|dataset_(size|length|len)",
    "tokens": r"((n|num|total|train(ing)?|dataset|max_train)_)+tokens",
    "mean_tokens": r"((mean|avg|average)_)?(tokens_per_sample|(sample|seq(uence)?)_(length|len|tokens))"
    r"|(mean|avg|average)_(tokens|len(gth)?|(seq(uence)?|sample)_len(gth)?)",
    "dataset": r"(train(ing)?_)?(data|datasets?|file)(_(path|file|name|dir|files))?|train(_file)?",
    "packing": r"(sample_|multi|neat_)?pack(ed|ing)?(_samples)?",
    "method": r"finetun(e|ing)(_type|_method)?|(fine_tuning|training|train|peft|tuner|adapter)(_(type|method))?",
    "lora_r": r"(lora_|adapter_)?(rank|dim)|r|lora_r_?",
    "lora_target_modules": r"((lora|adapter)_)?(targets?|modules|target_(modules|linear)|attn_modules)",
    "lora_dropout": r"(adapter_)?dropout|lora_dropout_p",
    "use_dora": r"dora",
    "use_rslora": r"rs_?lora",
    "gradient_checkpointing": r"(use_|enable_)?((grad(ient)?|activations?)_)?(checkpoint(ing|s)?|recompute)|ac",
    "activation_offloading": r"(enable_)?(activations?_offload|offload_activations)",
    "attn_implementation": r"(attn|attention)(_(impl|implementation|backend|type|kernel))?|flash(_?attn|_?attention)?",
    "optim": r"optimizer(_(type|name|class))?|optimiser",
    "optimizer_in_backward": r"optimizer_in_bwd|fused_backward(_pass)?",
    "dtype": r"(torch|model|param(s)?|weights?|load)_?dtype",
    "precision": r"(compute|train(ing)?|amp|autocast)_(precision|dtype)",
    "quant_method": r"quant(ization)?_(type|method|config)|bits",
    "bnb_4bit_quant_type": r"(bnb_)?(quant|4bit)_type|quant_dtype",
    "double_quant": r"(bnb_4bit_)?use_double_quant|double_quantization|(bnb_4bit_)?compress_statistics|nested_quant",
    "torch_compile": r"(use_|enable_)?compile|use_torch_compile",
    "stack": r"framework|library|backend|trainer|stack_name|software",
    "sharding": r"((parallel(ism)?|distributed|ddp|dist|shard(ing)?|dp|fsdp_sharding)_(strategy|type|mode))"
    r"|strategy|distributed|zero(_(stage|optimization))?",
    "dp_shard_size": r"((dp|data_parallel|fsdp|hsdp)_)?shard(ing)?_((group_)?size|degree|group)",
    "tp": r"tensor_(model_)?parallel(ism)?(_(size|degree))?|tp_(size|degree)",
    "pp": r"pipeline_(model_)?parallel(ism)?(_(size|degree|stages))?|pp_(size|degree)|stages",
    "pp_interleave": r"(num_layers_per_)?virtual_(pipeline|stages?)(_(model_parallel_size|stages?|size))?"
    r"|vpp?(_size)?|interleave",
    "cp": r"(context_parallel(ism)?|cp)(_(size|degree))?|(ulysses_|ring_)?(sp|sequence_parallel)_(size|degree)",
    "sequence_parallel": r"sp|seq_parallel|use_sequence_parallel",
    "offload": r"host_offload(ing)?|offload_(cpu|device)",
    "internode_gbps": r"(inter_?node|network|net|nic|ethernet|infiniband|ib)(_(bandwidth|bw|gbps|speed))?|bandwidth",
    "usd_per_gpu_hour": r"(gpu_)?(price|cost|rate|usd|dollars)(_(per_)?(gpu_)?(hour|hr|h))?|hourly_(price|cost|rate)"
    r"|usd_per_(gpu_h|hour|h)",
    "deadline": r"max_(hours|time|days)|time_limit|hours|within",
    "budget": r"max_(cost|usd|budget)|cost_limit",
    "provider": r"cloud|providers|vendor",
    "region": r"regions|location|zone",
    "spot": r"preemptible|interruptible|use_spot",
    "out": r"o|output(_(dir|file|path|folder))?|save(_dir|_path)?",
    "json": r"as_json|machine_readable",
    "explain": r"verbose|details?|v|why",
    "record": r"profile|calibration|calibrated|record_file",
}
"""Each of our options with the names, in full and with underscores, that it has elsewhere."""
VALUES: dict[str, dict[str, str]] = {
    r"(use_|load_in_)?4_?bit|(use_)?qlora|nf4|quant(ization|ize)?(_bits?)?(=.*4.*)?|bits=4": {"method": "qlora"},
    r"(use_|load_in_)?8_?bit|int8|(quant(ization|ize)?(_bits?)?|bits)=.*8.*": {
        "method": "qlora", "quant_method": "bnb-8bit"
    },
    r"(use_)?(lora|peft)(_enable)?": {"method": "lora"},
    r"full(_(finetun(e|ing)|fine_tun(e|ing)|parameter))?": {"method": "full"},
    r"b(float|f)16|(mixed(_precision)?|amp|autocast)(=b(float|f)16.*)?": {"precision": "bf16-autocast"},
    r"fp16|float16|half|(mixed(_precision)?|amp|autocast)=(fp|float)16.*": {"precision": "fp16-autocast"},
    r"fp32|float32|no_amp|(mixed(_precision)?|amp|autocast)=no|(b(float|f)|fp|float)16=(false|0|no|off)": {
        "precision": "fp32"
    },
    r"((use_)?flash_?(attn|attention)?_?3|fa_?3)|((use_)?flash(_?(attn|attention))?|attn(_impl(ementation)?)?|fa)="
    r"((kernels_community/)?(vllm_)?(fa|flash)(_?(attn|attention))?_?3|3)": {
        "attn_implementation": "flash_attention_3"
    },
    r"(use_)?flash(_?(attn|attention))?(_?2)?|attn(_impl(ementation)?)?=(fa|flash).*": {
        "attn_implementation": "flash_attention_2"
    },
    r"(use_|enable_)?liger(_kernels?)?": {"stack": "liger"},
    r"(use_)?unsloth": {"stack": "unsloth"},
    r"(fsdp|fsdp_)?(sharding_strategy)?=(shard_grad_op.*|2)": {"sharding": "fsdp-grad-op"},
    r"(fsdp|fsdp_)?(sharding_strategy)?=(hybrid_shard.*|4)|(use_)?hsdp": {"sharding": "hsdp"},
    r"(use_)?fsdp2?|fully_sharded|full_shard|(fsdp_)?(sharding_)?strategy=(fsdp2?|full_shard|1)": {"sharding": "fsdp"},
    r"(use_)?ddp|data_parallel|strategy=(ddp.*|no_shard|3)": {"sharding": "ddp"},
    r"(zero(_?stage)?|zero_optimization|deepspeed_stage)[_=]?([123])": {"sharding": r"zero\3"},
    r"strategy=(?:deepspeed_)?(zero|stage)_?(?:stage_?)?()([123])": {"sharding": r"zero\3"},
    r"(use_)?distributed_optimizer": {"sharding": "zero1"},
    r"(use_)?ring_attention": {"cp_kind": "ring"},
    r"(use_)?ulysses": {"cp_kind": "ulysses"},
    r"(lora_)?target(_modules)?=all.*": {"lora_target_modules": "all-linear"},
    r"(cpu_offload|offload_optimizer|optimizer_offload)(_device)?": {"offload": "optimizer"},
    r"offload_param(s|eters?)?(_device)?|param(s|eters?)?_offload": {"offload": "all"},
}  # fmt: skip
"""Names elsewhere, some with what is typed after them, of what are values of options here."""
OFF = ("false", "0", "no", "off", "none", "disable", "disabled")
"""What is typed after a switch that is not on."""
SENTENCES = {
    r"(learning_rate|lr|max_lr|min_lr|base_lr)|lr_(scheduler|schedule|decay)(_type|_style)?|scheduler"
    r"|warmup(_(ratio|steps))?|weight_decay|(adam_)?(beta[12s]?|epsilon|eps)|momentum|lora_alpha|alpha"
    r"|logging_(steps|dir)|log_(interval|every)|report_to|output_dir|run_name|project|wandb(_project)?|save_total_limit"
    r"|trust_remote_code|push_to_hub|hub_\w+|overwrite_output_dir":
    "no forecast depends on it, so leave it out",
    r"(global|total|effective)_(train_)?(batch|bsz?)(_size)?|gbs":
    "{per_device_train_batch_size} times {gradient_accumulation_steps} times the GPUs make it",
    r"(n|num_?|number_of_)?(nodes|machines|hosts|instances)":
    "{num_gpus} counts the GPUs of all machines, {gpus_per_node} those of one",
    r"(model|base_model|hf_model|pretrained_model)(_(name|id|path|name_or_path))?":
    "the model stands first, without an option: {model}",
    r"config(_file|_path)?|yaml|recipe": "a training file stands first, without an option: {model}",
    r"recompute_(activations|granularity)": "selective is {recompute_attention} and full {gradient_checkpointing}",
    r"resume(_from(_checkpoint)?)?": "what was interrupted goes on by itself; {fresh} starts anew",
    r"d(ata_)?p(arallel(ism)?)?(_(size|degree))?|data_parallel(_(size|degree))?":
    "data parallel is what {tp}, {pp} and {cp} leave of {num_gpus}",
    r"ep(_(size|degree))?|expert_(model_)?parallel(ism)?(_(size|degree))?": "expert parallelism is not built yet",
}  # fmt: skip
"""Names elsewhere of what is no option here, and what is said of them."""


def what_to_type(name: str, options: Container[str], spelled: Callable[[str, str], str], value: object = "") -> str:
    """A half-sentence that says what is typed instead of a name from elsewhere; empty where nothing is known by it.

    Args:
        name: As typed, with dashes or underscores.
        options: Those that can be typed there, with underscores.
        spelled: How an option, and its value where that is not empty, is typed there.
        value: What was typed after the name.
    """
    plain, after = name.strip().lstrip("-").replace("-", "_").lower(), str(value).strip().lower()
    for text in (f"{plain}={after}", plain):
        for words, values in VALUES.items():
            found = re.fullmatch(words, text)
            if found and all(option in options for option in values):
                if text == plain and after in OFF:
                    return "it is off unless something asks for it, so leave it out"
                typed = (spelled(option, found.expand(own)) for option, own in values.items())
                return f"type {' and '.join(typed)} instead"
    for option, words in ELSEWHERE.items():
        for no in ("", "no_"):
            if no + option in options and re.fullmatch(no + f"({words})", plain):
                off = "" if no or after not in OFF or f"no_{option}" not in options else "no_"
                return f"type {spelled(off + no + option, '')} instead"
    for words, sentence in SENTENCES.items():
        named = re.findall(r"{(\w+)}", sentence)
        if re.fullmatch(words, plain) and all(option in options for option in named):
            return sentence.format(**{option: spelled(option, "") for option in named})
    return ""
