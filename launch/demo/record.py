"""What is written next to the weights: how they came about, and the picture of the loss."""

import hashlib
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import tokenizers
import torch
import transformers

from demo.recipes import Training
from demo.train import Progress


def machine(device: torch.device) -> dict[str, Any]:
    """The kind of machine, without its name or any path of it."""
    kind: dict[str, Any] = {
        "device": device.type,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "architecture": platform.machine(),
    }
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpu.read_text().splitlines()
            if line.startswith("model name")
        ]
        kind["processor"] = names[0] if names else "unknown"
    if device.type == "cuda":
        kind["accelerator"] = torch.cuda.get_device_name(device)
    return kind


def versions() -> dict[str, str]:
    """The versions that the result depends on; the data are those of this Python's library."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "numpy": numpy.__version__,
    }


def write(
    folder: Path,
    recipe: Training,
    progress: Progress,
    seed: int,
    parameters: int,
    data_digest: str,
    device: torch.device,
) -> None:
    """`training.json` and `training.png`; the JSON comes last and says that all is done."""
    plot(folder / "training.png", recipe, progress)
    weights = (folder / "model.safetensors").read_bytes()
    contents = {
        "name": recipe.name,
        "seed": seed,
        "parameters": parameters,
        "recipe": asdict(recipe),
        "steps": progress.step,
        "tokens": progress.tokens,
        "wall_seconds": round(progress.seconds, 1),
        "data_sha256": data_digest,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "machine": machine(device),
        "versions": versions(),
        "curve": thin(progress.curve),
    }
    part = folder / "training.json.part"
    part.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    os.replace(part, folder / "training.json")


def thin(curve: list[dict[str, float]], most: int = 200) -> list[dict[str, float]]:
    """Few enough points to read."""
    stride = max(1, -(-len(curve) // most))
    return [*curve[::-1][::stride]][::-1]


def plot(path: Path, recipe: Training, progress: Progress) -> None:
    """The losses and the agreement with the teacher, over the tokens seen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, label in (
        ("text", "library text"),
        ("math", "answers of multiplications"),
        ("overlap", "agreement with the teacher, T = 0.5"),
    ):
        points = [(p["tokens"] / 1e6, p[name]) for p in progress.curve if name in p]
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(
                xs,
                ys,
                alpha=0.25,
                color=(line := axes.plot(xs, smooth(list(ys)), label=label)[0]).get_color(),
                linewidth=0.8,
            )
            line.set_zorder(3)
    axes.set(
        title=f"{recipe.name}: {progress.step} steps, {progress.seconds / 60:.0f} minutes",
        xlabel="million tokens",
        ylabel="nats per token",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=90, bbox_inches="tight")
    plt.close(figure)


def smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """A running mean, since single batches jump."""
    out, mean = [], values[0]
    for value in values:
        mean = keep * mean + (1 - keep) * value
        out.append(mean)
    return out
