"""What the user does with the model. One `Run` is fully resolved: no field is left to a default.

`Run` is what the physics reads. How options, files and stack defaults become a `Run`, with the
origin of every field, is in `resolve.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunecast.model.stacks import FLASH_ATTENTION

BY_CARD = ("loss_budget_bytes", "loss_tiles_from", "paged_bytes", "weights_stay", "loops_experts")
"""Fields that are worked out, most of them from the memory of a card, and never an option."""
BY_DATA = ("samples_unevenness",)
"""Fields that what is known of the data gives, and never an option."""
BY_SPREAD, MESH = "dtypes_by_spread", "mesh"
"""Options that a training file leaves for plans (`file_spread`): its dtypes by how the job is spread, and how FSDP's
shards lie on the GPUs."""


BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's own ``reduce_bucket_size`` (zero/config.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training job, resolved. Names follow TRL / Transformers."""

    method: str
    """``lora``, ``qlora`` or ``full``."""
    lora_r: int = 0
    """Adapter rank; 0 for ``full``."""
    lora_target_modules: tuple[str, ...] = ()
    """Last parts of module names, resolved (``all-linear`` is expanded; table of tokens and head only if named); empty
    for ``full``."""
    lora_dropout: float = 0.0
    use_dora: bool = False
    """Weight-decomposed adapters: a trained magnitude per output of each adapted map (PEFT)."""
    use_rslora: bool = False
    """Adapters scaled by alpha / sqrt(r): no cost of its own."""
    lora_bias: bool = False
    """A trained bias on each ``lora_B``."""
    modules_to_save: tuple[str, ...] = ()
    """Of the table of tokens and the head (the model's own names), those trained whole beside the adapters; PEFT keeps
    their originals too."""
    modules_to_save_dtype: str | None = None
    """Storage of those copies; None: the base's `dtype`, as PEFT makes them."""
    adapter_dtype: str = "fp32"
    """Storage of adapter weights, gradients and optimizer state: ``fp32``, ``bf16`` or ``fp16``."""
    dtype: str = "bf16"
    """Storage of unquantized base weights: ``bf16``, ``fp16`` or ``fp32``."""
    master_dtype: str | None = None
    """``fp32`` where shards of what trains, gradients and states are, and only what is gathered is `dtype` or
    `adapter_dtype` (FSDP's mixed precision)."""
    reduce_dtype: str | None = None
    """The dtype in which FSDP reduces gradients (``MixedPrecisionPolicy.reduce_dtype``); None: their own."""
    precision: str = "bf16-autocast"
    """``bf16-autocast``, ``fp16-autocast``, ``bf16``, ``fp16`` (pure) or ``fp32``."""
    bnb_4bit_quant_type: str | None = None
    """``nf4`` or ``fp4`` when the base is 4-bit, else None."""
    double_quant: bool = False
    bnb_4bit_compute_dtype: str | None = None
    """What 4-bit weights become to be multiplied (``BitsAndBytesConfig``); None: the dtype of `precision`."""
    quantize_moe_experts: bool = False
    """Whether stacked experts are in 4 bits too, and restored whole whenever they run (axolotl's field)."""
    quant_method: str | None = None
    """How a quantized base is stored, by one of `stacks.QUANT_METHODS`; None also stands for bitsandbytes' 4 bits."""
    gptq_kernel: str = "triton"
    """What multiplies with a GPTQ base: ``triton`` v2 in one kernel, ``torch`` by PyTorch's operators."""
    gptq_group_size: int = 128
    """Weights along the input that share a scale and a zero; -1: all of them."""
    upcast_non_quantized: bool = False
    """Whether PEFT's ``prepare_model_for_kbit_training`` left all but 4-bit weights in fp32; `dtype` then is."""
    max_length: int = 1024
    """Tokens per sample after padding or packing."""
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = True
    reentrant: bool = False
    """Reentrant checkpointing, which recomputes a little more than the other kind."""
    checkpoint_every: int = 1
    """Of how many layers one is checkpointed: the first of each so many (selective checkpointing)."""
    checkpoint_first: int | None = None
    """How many of the first layers are checkpointed (Megatron-LM's ``--recompute-method block``); None: all."""
    checkpoint_keeps_ops: bool = False
    """Whether checkpoints keep attention's results and every other product's too (torchtitan's selective ``op``)."""
    recompute_attention: bool = False
    """Whether layers keep all but their attention's results, which the backward makes again (Megatron-LM's selective
    recomputation); layers have no checkpoints then."""
    activation_offloading: bool = False
    """Whether checkpoints are kept in host memory (Unsloth's gradient checkpointing, torchtune's and TRL's option)."""
    optim: str = "adamw_torch"
    """Hugging Face ``OptimizerNames``; ``adamw_torch`` is foreach on CUDA."""
    optimizer_in_backward: bool = False
    """Whether every tensor is updated as soon as its gradient is there, which then goes (torchtune)."""
    attn_implementation: str = "sdpa"
    sdpa_cudnn: bool = False
    """Whether ``sdpa`` runs cuDNN's attention where a card has it, as PyTorch does since 2.11 (`sdpa.py`)."""
    padding_mask: bool = False
    """Whether rows are samples of unlike length, padded to the longest of their micro-batch, and the model is told
    which tokens are padding (`rows.py`)."""
    pad_to_multiple_of: int = 1
    """Tokens that the length of such rows is a multiple of (transformers' collators); 1: any length."""
    loops_experts: bool = False
    """Whether products of stacked experts are one per expert, as on most cards, and not one kernel (`grouped.py`)."""
    attention_length: int | None = None
    """Tokens of the documents in a packed row that attention keeps apart (`documents.py`); None: a row is one."""
    samples_unevenness: float | None = None
    """Mean of squared lengths over the squared mean, of samples that a micro-batch lays end to end without padding
    (`flat_rows.py`); ``max_length`` is then their mean. None: samples are rows."""
    loss_type: str = "nll"
    """Loss path: ``nll`` holds the full logits."""
    loss_budget_bytes: int | None = None
    """What Unsloth's losses let a chunk of logits take, half of what is free on the card at the first one, within
    their own bound; None: plenty, assumed where no card is known."""
    loss_tiles_from: int | None = None
    """Fewest tokens with a label that Unsloth's loss of 2026.10.9 takes in tiles: 4,096 on cards above 24.5 GiB, 0 on
    smaller ones, -1 where it never does (``_flash_min_rows``, ``_flash_ce_ok``); None: a large card, assumed."""
    paged_bytes: int = 0
    """Paged optimizer state of one GPU that goes to the host and comes back in every step, because it does not fit
    beside the rest on this card (`paging`)."""
    keeps_outputs: bool = False
    """Whether the loop keeps the model's output, and its logits, until the backward is over: one of one's own
    (``out = model(...)``, then ``out.loss.backward()``); the Trainer lets it go before."""
    token_metrics: str = "none"
    """What the trainer logs of every token from full logits: ``none``, ``accuracy``, or ``entropy`` with it (TRL's,
    `seen_logits.py`)."""
    trainer_loop: bool = False
    """Whether transformers' Trainer drives the steps (`trainer_loop.py`); else they follow each other, as in a
    calibration."""
    hf_code: str = "5"
    """Age of Hugging Face's code, by the first transformers of its kind: ``5`` shifts labels and stacks experts,
    ``4.49`` has a linear map for each of an expert's, ``4.46`` copies shifted fp32 logits beside the 16-bit ones,
    ``4.45`` (and before) lets the 16-bit ones go. PEFT and Liger of the same age: `linears.py` and `fused_losses.py`
    say what differs."""
    fp8: str | None = None
    """Layers multiply in 8-bit floats, by one of `fp8.RECIPES`: Transformer Engine's, Megatron's or torchao's."""
    fp8_weights: bool = False
    """Whether the weights that are multiplied in 8 bits are stored so, without a 16-bit copy (Transformer Engine's
    ``fp8_model_init``, NeMo's ``fp8_params``, Megatron's ``--fp8-param-gather``)."""
    fused_kernels: tuple[str, ...] = ()
    """Parts of `FUSED_KERNELS` that run as one kernel each instead of as PyTorch's operators."""
    torch_compile: bool = False
    """Whether every layer and the loss are compiled, so that chains of memory-bound kernels are one kernel each."""
    compile_loss: bool = True
    """With `torch_compile`: whether the loss is compiled too; else the layers alone (torchtitan before 2025)."""
    stack: str = "hf-peft"
    """Software stack whose defaults and kernels apply."""
    stack_version: str = ""
    """Versions of the stack's packages whose defaults were taken; no formula reads it."""
    num_gpus: int = 1
    sharding: str = "none"
    """``none``, ``ddp``, ``zero1``, ``zero2``, ``zero3``, ``fsdp``, ``fsdp-grad-op``, ``hsdp`` (see `sharding.py`)."""
    tp: int = 1
    """GPUs that split every layer's matrices (tensor parallel)."""
    sequence_parallel: bool = False
    """Whether tensor-parallel GPUs also split the tokens of norms and residuals (Megatron's sequence parallelism)."""
    async_tp: bool = False
    """Whether the exchanges of tensor parallelism run beside products instead of between them (PyTorch's async TP)."""
    pp: int = 1
    """Stages that the layers are dealt out to (pipeline parallel)."""
    weights_stay: bool = False
    """Whether weights that FSDP gathered for one backward stay whole for the next forward (`parallel.local_run`)."""
    pp_interleave: int = 1
    """Chunks of layers per stage (interleaved 1F1B); 1 is the plain schedule."""
    cp: int = 1
    """GPUs that split every sequence (context parallel)."""
    cp_kind: str = "ring"
    """``ring`` passes keys and values around, ``ulysses`` exchanges heads for tokens."""
    offload: str = "none"
    """What lives in host memory: ``none``, ``optimizer`` (its state and update), ``all`` (parameters too)."""
    loads_on_gpu: bool | None = None
    """Whether every GPU holds the whole base while it loads, before FSDP or ZeRO-3 shares it; None: as the stack's
    loader does (`loading`)."""
    sync_each_micro_batch: bool = False
    """Whether gradients are reduced after every micro-batch: a trainer that accumulates without ``no_sync``."""
    overlap_comm: bool = False
    """Whether ZeRO-1 and ZeRO-2 reduce gradients beside the backward (DeepSpeed's setting, which is off by default;
    ZeRO-3 always does, like DDP and FSDP)."""
    reduce_bucket_size: int = BUCKET_ELEMENTS
    """Elements of the bucket in which DeepSpeed's ZeRO reduces gradients."""
    dp_shard_size: int = 0
    """With ``hsdp``: GPUs that a copy is sharded over beside those that split its sequences; 0: those of a machine."""
    fsdp_version: int = 2
    """1: flat parameters (``FullyShardedDataParallel``); 2: ``fully_shard``."""
    gpus_per_node: int = 8
    """GPUs of one machine, joined by its fastest link."""

    def __post_init__(self) -> None:
        """Targets of rank 0 are none: their maps are frozen."""
        if self.lora_r == 0:
            object.__setattr__(self, "lora_target_modules", ())

    @property
    def dp(self) -> int:
        """Copies of the model that see different samples, sharded or not."""
        return self.num_gpus // (self.tp * self.pp * self.cp)

    @property
    def machines(self) -> int:
        """Machines of `gpus_per_node` GPUs that the job takes, the last perhaps in part."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def attention_spans(self) -> int | None:
        """Tokens that attention spans, where it keeps documents or samples apart in a row; None: all of the row."""
        if self.samples_unevenness is None:
            return self.attention_length
        uneven, batch = self.samples_unevenness, self.per_device_train_batch_size
        return max(round(self.max_length * batch * uneven / (uneven + batch - 1.0)), 1)

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens one copy of the model takes in one forward pass."""
        return self.max_length * self.per_device_train_batch_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens the whole job processes in one optimizer step."""
        return self.tokens_per_micro_batch * self.gradient_accumulation_steps * self.dp

    @property
    def has_padding(self) -> bool:
        """Whether micro-batches have padding in them: a sample alone is its own longest, but may be filled up."""
        return self.padding_mask and (self.per_device_train_batch_size > 1 or self.pad_to_multiple_of > 1)

    @property
    def flash(self) -> bool:
        """Whether transformers calls flash kernels, of whichever version."""
        return self.attn_implementation in FLASH_ATTENTION

    @property
    def compute_dtype(self) -> str:
        """The dtype the matrix products run in: ``bf16``, ``fp16`` or ``fp32``."""
        return self.precision.removesuffix("-autocast")

    @property
    def four_bit_dtype(self) -> str:
        """The dtype in which a 4-bit base multiplies."""
        return self.bnb_4bit_compute_dtype or self.compute_dtype

    @property
    def experts_dtype(self) -> str:
        """The dtype in which stacks of experts multiply: those in 4 bits are restored in that of the checkpoint."""
        return self.four_bit_dtype if self.quantize_moe_experts and self.upcast_non_quantized else self.dtype

    @property
    def saved_dtype(self) -> str:
        """Storage of modules trained whole beside adapters."""
        return self.modules_to_save_dtype or self.dtype

    @property
    def product_dtype(self) -> str:
        """The dtype most products run in, whose peak a utilisation is against."""
        return "fp8" if self.fp8 else self.four_bit_dtype

    @property
    def autocast(self) -> bool:
        """Whether the step runs under torch.autocast."""
        return self.precision.endswith("-autocast")

    @property
    def base_quantization(self) -> str | None:
        """How the base is stored: ``bnb-4bit``, ``bnb-8bit``, ``gptq-4bit``, ``gptq-8bit``, or None."""
        return self.quant_method or ("bnb-4bit" if self.bnb_4bit_quant_type else None)

    @property
    def shifts_logits(self) -> bool:
        """Whether the loss cuts logits, not labels, to be one token shorter (transformers before 4.49)."""
        return self.hf_code in ("4.46", "4.45")

    def checkpoints_layer(self, index: int) -> bool:
        """Whether the layer of this index keeps its input alone."""
        first = self.checkpoint_first is None or index < self.checkpoint_first
        return self.gradient_checkpointing and first and index % self.checkpoint_every == 0

    def fuses(self, part: str) -> bool:
        """Whether this part runs as a fused kernel."""
        return part in self.fused_kernels

    @property
    def holds_checkpoints(self) -> bool:
        """Whether checkpoints and their gradients outlive their layer's backward, to its end.

        FSDP 1 hangs a hook on every input of a unit without trained parameters and drops it only after the
        backward (torch ``_register_post_backward_reshard_only_hook``); the inputs of reentrant checkpoints are
        leaves, so the hook's node holds them and their gradients. One GPU has version 1 only as `step.tape_run`,
        which leaves the sharding out.
        """
        sharded = self.sharding in ("fsdp", "fsdp-grad-op", "hsdp") or self.num_gpus == 1
        return sharded and self.fsdp_version == 1 and self.has_adapters and self.reentrant

    @property
    def has_adapters(self) -> bool:
        """Whether low-rank adapters are trained and the base is frozen."""
        return self.method in ("lora", "qlora")


def tokenless(run: Run) -> Run:
    """What updates and collectives depend on: trained and gathered tensors, not how many tokens there are."""
    return replace(run, max_length=1, per_device_train_batch_size=1)
