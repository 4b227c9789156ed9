"""A recommended plan as a rental task: SkyPilot's task YAML and dstack's task configuration.

Both first run ``tunecast calibrate`` on the machine that was rented, then forecast the very training file with that
record, then train. Formats: SkyPilot ``sky/utils/schemas.py`` (`get_task_schema`, `get_resources_schema`), dstack
``core/models/configurations.py``, ``profiles.py`` and ``resources.py``.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from getpass import getuser
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.configs.write import OUTPUT
from tunecast.model.stacks import FLASH_2, FLASH_3

if TYPE_CHECKING:
    from tunecast.model.market import Candidate

SKYPILOT_GPUS = {
    "a10-24gb": "A10", "a10g-24gb": "A10G", "a100-pcie-40gb": "A100", "a100-sxm4-40gb": "A100",
    "a100-pcie-80gb": "A100-80GB", "a100-sxm4-80gb": "A100-80GB", "a800-pcie-80gb": "A800", "a800-sxm4-80gb": "A800",
    "b200-sxm-180gb": "B200", "h100-pcie-80gb": "H100", "h100-sxm5-80gb": "H100", "h100-nvl-94gb": "H100-NVL",
    "h200-sxm5-141gb": "H200", "l4-24gb": "L4", "l40-48gb": "L40", "l40s-48gb": "L40S", "mi300x-192gb": "MI300X",
    "t4-16gb": "T4", "v100-sxm2-16gb": "V100", "v100-pcie-16gb": "V100", "v100-sxm2-32gb": "V100-32GB",
    "v100-pcie-32gb": "V100-32GB", "a40-48gb": "A40", "rtx-a4000-16gb": "A4000", "rtx-a4500-20gb": "RTXA4500",
    "rtx-a5000-24gb": "RTXA5000", "rtx-a6000-48gb": "A6000", "gh200-96gb": "GH200", "rtx-3060-12gb": "RTX3060",
    "rtx-3090-24gb": "RTX3090", "rtx-4070-12gb": "RTX4070", "rtx-4090-24gb": "RTX4090", "rtx-5080-16gb": "RTX5080",
    "rtx-5090-32gb": "RTX5090", "quadro-rtx-6000-24gb": "RTX6000", "rtx-4000-ada-20gb": "RTX4000-Ada",
    "rtx-6000-ada-48gb": "RTX6000-Ada",
}  # fmt: skip
"""Names under which ``sky show-gpus -a`` lists them (skypilot-org/skypilot docs/source/compute/show-gpus-all.txt)."""
RUNPOD_GPUS = {"a100-sxm4-80gb": "A100-80GB-SXM", "h100-sxm5-80gb": "H100-SXM", "h200-sxm5-141gb": "H200-SXM",
               "rtx-a4000-16gb": "RTXA4000", "rtx-a6000-48gb": "RTXA6000"}  # fmt: skip
"""Those of RunPod that have names of their own there (``GPU_NAME_MAP`` of sky/provision/runpod/utils.py), where H100
and A100-80GB are PCIe cards."""
SKYPILOT_CLOUDS = {"aws": "aws", "azure": "azure", "gcp": "gcp", "lambda": "lambda", "nebius": "nebius", "oci": "oci",
                   "paperspace": "paperspace", "runpod": "runpod", "vast": "vast", "digitalocean": "do"}  # fmt: skip
DSTACK_BACKENDS = {"aws": "aws", "azure": "azure", "gcp": "gcp", "lambda": "lambda", "nebius": "nebius", "oci": "oci",
                   "runpod": "runpod", "vast": "vastai", "vultr": "vultr"}  # fmt: skip
FORM_FACTORS = ("pcie", "sxm", "sxm2", "sxm4", "sxm5")
ENVIRONMENT_GB = 60
"""Image, packages and caches beside the weights: a torch environment with CUDA libraries takes 15 to 20 GB; thrice
that, since a full disk ends a run."""
CHECKPOINTS = "/checkpoints"
"""Where a bucket is mounted that outlives the machine."""
NAME_LENGTH = 40
LAST = f"last=$(ls -d {OUTPUT}/checkpoint-* 2>/dev/null | sort -V | tail -n 1)"
"""The newest checkpoint, which TRL has to be told; the others find it by themselves."""
RESUMED = {"trl": " ${last:+--resume_from_checkpoint $last}"}
TRAINERS = {
    "trl": ("'trl[peft]' bitsandbytes", "trl sft --config {file}"),
    "axolotl": ("axolotl", "axolotl train {file}"),
    "llama-factory": ("llamafactory bitsandbytes", "FORCE_TORCHRUN=1 llamafactory-cli train {file}"),
}
"""What to install, and how to start."""
FLASH_PACKAGES = {FLASH_2: "flash-attn --no-build-isolation", FLASH_3: "kernels"}
"""What pip installs for flash kernels; transformers gets those of version 3 from the hub by ``kernels``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a rental task says, whoever runs it: a job of one machine."""

    candidate: Candidate
    model: str
    weights_bytes: float
    config_kind: str
    config_file: str
    """Name of the training file, beside the task."""
    packages: tuple[str, ...] = ()
    """To install beside the trainer: of kernels that the plan counts on."""
    deepspeed: bool = False
    """Whether the training file starts DeepSpeed, which is an extra of every trainer."""
    fused_kernels: tuple[str, ...] = ()
    """The plan's, told to the forecast where it counts on such packages, since no training file does."""
    attention: str = ""
    """The implementation of attention, which may need a package of its own that no trainer brings."""
    plan: str = ""
    """What is trained and for how long, which another training differs in."""
    saved_bytes: float = 0.0
    """Checkpoints that are on the disk at once, and the result."""

    @property
    def interruptible(self) -> bool:
        """Whether the machine may be taken away, so that its checkpoints have to outlive it."""
        return self.candidate.kind == "spot"

    @property
    def unsaid_provider(self) -> str:
        """The provider whose price the plan has, where SkyPilot does not know it."""
        provider = str(self.candidate.price.offer.get("provider") or "")
        return "" if provider in SKYPILOT_CLOUDS else provider

    @property
    def most_usd_per_h(self) -> float:
        """What the machine may cost, a tenth above the plan's price."""
        return round(1.1 * self.candidate.price.usd_per_h, 2)

    @property
    def name(self) -> str:
        """A short name of lower-case letters, digits and dashes."""
        words = re.sub(r"[^a-z0-9]+", "-", f"tunecast-{self.model.rpartition('/')[2]}".lower())
        return words[:NAME_LENGTH].strip("-")

    @property
    def bucket(self) -> str:
        """A name that nobody else has, for buckets' names are global, nor another training in this folder, whose
        checkpoints it would go on with."""
        told = f"{self.plan} {self.candidate.target.id} {self.config_kind} {os.getcwd()} {getuser()}"
        return f"{self.name}-{hashlib.sha256(told.encode()).hexdigest()[:10]}"

    @property
    def disk_gb(self) -> int:
        """Disk to ask for: the published weights, what is saved, no less than as much again, and the environment."""
        return math.ceil((self.weights_bytes + max(self.weights_bytes, self.saved_bytes)) / 1e9) + ENVIRONMENT_GB

    @property
    def install(self) -> list[str]:
        """Shell lines that set the machine up."""
        beside = ("deepspeed", *self.packages) if self.deepspeed else self.packages
        trainer = " ".join((TRAINERS[self.config_kind][0], *beside))
        flash = FLASH_PACKAGES.get(self.attention)
        return ['pip install "$TUNECAST"', f"pip install {trainer}", *([f"pip install {flash}"] if flash else [])]

    @property
    def commands(self) -> list[str]:
        """Shell lines: measure this machine, forecast the run with what was measured, train."""
        gpu, count = self.candidate.target.id, self.candidate.num_gpus
        several = f" --num-gpus {count}" if count > 1 else ""
        fused = f" --fused-kernels {','.join(self.fused_kernels)}" if self.packages else ""
        train = TRAINERS[self.config_kind][1].format(file=self.config_file)
        resumed = RESUMED.get(self.config_kind, "") if self.interruptible else ""
        return [
            f"tunecast calibrate --out records{several}",
            # a machine with another form of the card has a record that this forecast refuses
            f"tunecast estimate {self.config_file} --gpu {gpu}{several}{fused} --record records || true",
            *([f"ln -sfn {CHECKPOINTS} {OUTPUT}"] if self.interruptible else []),
            *([LAST] if resumed else []),
            train + resumed,
        ]


ENVIRONMENT = {"TUNECAST": "tunecast[calibrate]"}
"""What pip installs; replace it by the address of your own clone."""


def skypilot_task(task: Task) -> dict[str, Any]:
    """``sky launch FILE``, in the folder of the training file."""
    gpu, offer = task.candidate.target.id, task.candidate.price.offer
    if gpu not in SKYPILOT_GPUS:
        raise NotSupportedError(
            f"SkyPilot's list of accelerators has no name for {gpu}; type --write dstack=dstack.yaml, or choose "
            "another card with --gpu."
        )
    cloud, region = SKYPILOT_CLOUDS.get(str(offer.get("provider"))), str(offer.get("region") or "global")
    name = RUNPOD_GPUS.get(gpu, SKYPILOT_GPUS[gpu]) if cloud == "runpod" else SKYPILOT_GPUS[gpu]
    place = cloud if region in ("global", "all") or cloud is None else f"{cloud}/{region}"
    resources = {
        "accelerators": f"{name}:{task.candidate.num_gpus}",
        "use_spot": task.interruptible,
        "disk_size": task.disk_gb,
        "max_hourly_cost": task.most_usd_per_h,
    }
    bucket = {"name": task.bucket, "mode": "MOUNT_CACHED"}
    return {
        "name": task.name,
        "workdir": ".",
        "resources": resources if place is None else {"infra": place, **resources},
        "num_nodes": 1,
        **({"file_mounts": {CHECKPOINTS: bucket}} if task.interruptible else {}),
        "envs": dict(ENVIRONMENT),
        "setup": "\n".join(task.install) + "\n",
        "run": "\n".join(("set -e", *task.commands)) + "\n",
    }


def dstack_gpu(gpu_id: str) -> str:
    """gpuhunt's short name of a card, by which dstack finds it: ``rtx-6000-ada-48gb`` is RTX6000Ada."""
    parts = [part for part in gpu_id.split("-")[:-1] if part not in FORM_FACTORS]
    if parts[:1] == ["rtx"] and parts[1][:1] == "a":
        parts = parts[1:]  # the RTX A series goes without RTX
    if parts[:2] == ["rtx", "pro"]:
        parts = parts[:3]
    if parts[0] == "quadro":
        parts = parts[1:]
    words = {"ti": "Ti", "ada": "Ada"}
    return "".join(words.get(part, part.upper()) for part in parts)


def dstack_task(task: Task) -> dict[str, Any]:
    """``dstack apply -f FILE``, in the folder of the training file."""
    candidate, offer = task.candidate, task.candidate.price.offer
    assert candidate.target.gpu is not None
    if task.interruptible:
        raise NotSupportedError(
            "A dstack task of an interruptible machine is not built yet: its checkpoints would have to be on a volume "
            "of yours that outlives it; write skypilot=FILE, which keeps them in a bucket, or leave --spot out."
        )
    memory_gb = candidate.target.gpu.memory_marketing_gb  # gpuhunt lists 270 of a B300's 288
    backend, region = DSTACK_BACKENDS.get(str(offer.get("provider"))), str(offer.get("region") or "global")
    gpu = {
        "name": dstack_gpu(candidate.target.id),
        "memory": f"{0.9 * memory_gb:.0f}GB..{1.1 * memory_gb:.0f}GB",
        "count": candidate.num_gpus,
    }
    found: dict[str, Any] = {
        "type": "task",
        "name": task.name,
        "nodes": 1,
        "python": "3.12",
        "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
        "files": [task.config_file],
        "commands": [*task.install, *task.commands],
        "resources": {"gpu": gpu, "disk": f"{task.disk_gb}GB.."},
        "spot_policy": "on-demand",
        "max_price": task.most_usd_per_h,
    }
    if backend is not None:
        found["backends"] = [backend]
        if region not in ("global", "all"):
            found["regions"] = [region]
    return found


TASKS: dict[str, Callable[[Task], dict[str, Any]]] = {"skypilot": skypilot_task, "dstack": dstack_task}
