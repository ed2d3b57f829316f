"""Train two tasks on several ranks and write first gradients and learned state to a file.

Run on every rank by test_distributed.py with arguments PROCESSES PRECISION METHODS OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from safetensors.torch import save_file
from small import AUGMENTED_VIEWS, patterns, tiny_vit
from torch import Tensor

from coda_prompt.research import methods
from coda_prompt.research.methods import METHODS
from coda_prompt.research.streams.stream import make_stream
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.settings import Event, Training

OPTIONS: dict[str, dict[str, Any]] = {
    "coda-p": {"components": 7, "tasks": 2, "preset": "paper"},
    "coda-p-s": {"orthogonality_weight": 0.1, "head_init": "imprint"},
    "l2p++": {"pool": 8, "length": 4},
    "dualprompt": {"expert_length": 4},
}


def two_tasks(name: str, fabric: Fabric, **training: Any) -> dict[str, Tensor]:
    """Return the first gradients of each task, the learned state and the accuracy matrix.

    33 images per task in batches of 16: the last batch has one image, so one of two ranks has
    none. Two epochs are six steps per task. Whole networks train without weight decay: the
    gradient of their key biases is only rounding, which Adam would scale up with the decay.
    """
    decay = 0.01 if METHODS[name].type.frozen_backbone else 0.0
    settings = {"epochs": 2, "batch_size": 16, "learning_rate": 1e-3, "weight_decay": decay}
    stream = make_stream(patterns(classes=6, train=11, test=7), tasks=2)
    method = methods.make(name, tiny_vit(), **OPTIONS.get(name, {}))
    found: dict[str, Tensor] = {}

    def record_first_gradients(event: Event) -> None:
        if event.kind == "step" and event.epoch == 0 and event.step == 0:
            for key, parameter in method.named_parameters():
                if parameter.requires_grad:
                    assert parameter.grad is not None, f"{key} has no gradient"
                    found[f"gradient.{event.task}.{key}"] = parameter.grad.clone()

    engine = Engine(
        AUGMENTED_VIEWS,
        Training(**settings | training),
        fabric=fabric,
        on_event=record_first_gradients,
    )
    result = engine.run(method, stream)
    found |= {f"learned.{key}": tensor for key, tensor in method.learned_state().items()}
    return found | {"matrix": torch.from_numpy(result.matrix)}


def main() -> None:
    processes, precision, names, out = sys.argv[1:]
    torch.set_num_threads(1)
    fabric = Fabric(
        accelerator="cpu",
        devices=int(processes),
        strategy="ddp" if int(processes) > 1 else "auto",
        precision=precision,  # type: ignore[arg-type]
    )
    fabric.launch()
    for name in names.split(","):
        found = two_tasks(name, fabric)
        if fabric.global_rank == 0:
            contiguous = {key: tensor.contiguous().clone() for key, tensor in found.items()}
            save_file(contiguous, Path(out) / f"{name}.safetensors")
    if fabric.world_size > 1:  # a rank that exits while another communicates makes it abort
        fabric.barrier()
        torch.distributed.destroy_process_group()
