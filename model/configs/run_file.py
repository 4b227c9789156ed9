"""What a training file says, in our words; and the sheet it is written on while a reader works."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tunecast.model.file_spread import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """One training file, read. Options are named as on our command line, with underscores."""

    format: str
    """``axolotl``, ``llama-factory``, ``trl``, ``torchtune`` or ``litgpt``."""
    model_name: str
    """Hub id, folder or file of the base model, as the file has it."""
    options: dict[str, Any]
    """Run options and amounts: what the file states and what its framework adds by default."""
    their_fields: dict[str, str]
    """For every option that the file states, the field that stated it; framework defaults are not listed."""
    stack: str
    """Whose kernels run: ``hf-peft`` where the framework calls the plain ones."""
    ignored: tuple[str, ...]
    """Fields of the file that no option was made of, dotted."""
    notes: tuple[str, ...]
    """What the user should be told: readings that need a word, costs that are not counted."""
    whole_dtypes: dict[str, Any] = field(default_factory=dict)
    """Dtypes without DeepSpeed and FSDP, which change them: for a command line and plans that spread the job
    otherwise."""
    wide_notes: tuple[str, ...] = ()
    """Those of `notes` and others that are about weights in fp32, true without DeepSpeed and FSDP alone."""
    mesh: Mesh | None = None
    """How FSDP's shards and their copies lie on the GPUs, where the file says it."""
    tf32: bool = False
    """Whether products in fp32 are to run in TF32."""
    most_samples: int | None = None
    """Samples that the file trains at most, of all of its data sets together."""
    saves: dict[str, int] = field(default_factory=dict)
    """``save_steps`` and ``save_total_limit`` of checkpoints that the file asks for, by our names."""

    @property
    def origins(self) -> dict[str, str]:
        """By option: ``file`` where the file states it, ``stack-default`` where its framework adds it."""
        return {name: "file" if name in self.their_fields else "stack-default" for name in self.options}


@dataclass(slots=True, kw_only=True)
class Draft:
    """The options of one file under construction."""

    options: dict[str, Any] = field(default_factory=dict)
    their_fields: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    model_name: str = ""
    prefix: str = ""
    """Put before field names while a companion file is read, as ``accelerate: ``."""
    whole_dtypes: dict[str, Any] = field(default_factory=dict)
    """As of `RunFile`."""
    mesh: Mesh | None = None
    """As of `RunFile`."""
    most_samples: int | None = None
    """As of `RunFile`."""
    saves: dict[str, int] = field(default_factory=dict)
    """As of `RunFile`."""
    whole_batch: int | None = None
    """Samples of a step over all GPUs, where DeepSpeed's file states them beside what they follow from."""
    wide_notes: list[str] = field(default_factory=list)
    """As of `RunFile`."""
    in_bytes: bool = False
    """Whether a 4-bit base is stored in bytes, which FSDP does not shard."""
    checkpoints_off: str = "gradient_checkpointing: false"
    """How the file says that the trainer sets no checkpoints of its own."""

    def put(self, name: str, value: Any, theirs: str | None = None) -> None:
        """Set an option; `theirs` is the field that states it, None for a framework's default. None is skipped."""
        if value is None:
            return
        self.options[name] = value
        self.their_fields.pop(name, None)
        if theirs is not None:
            self.their_fields[name] = self.prefix + theirs

    def drop(self, name: str) -> None:
        """Forget an option."""
        self.options.pop(name, None)
        self.their_fields.pop(name, None)

    def note(self, text: str) -> None:
        """Add a sentence for the user, once."""
        if text not in self.notes:
            self.notes.append(text)

    def note_wide_weights(self, text: str) -> None:
        """Add a sentence on weights in fp32, which DeepSpeed's own casts make untrue (`withdraw_wide_weights`)."""
        self.note(text)
        self.wide_notes.append(text)

    def withdraw_wide_weights(self) -> None:
        """Take back every sentence on weights in fp32."""
        self.notes = [note for note in self.notes if note not in self.wide_notes]
