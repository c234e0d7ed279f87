"""The training loop: the same for the models, with or without a teacher, and for a trained head."""

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from demo import checkpoint, ranks
from demo.batches import Batch
from demo.recipes import Recipe, Training

WARM_UP = 0.02  # of the budget
SAVE_EVERY = 60.0  # seconds
LOG_EVERY = 10  # steps
DRAFT_TEMPERATURE = 0.5  # where the draft's agreement with its teacher is wanted most

# Of a batch: what is minimised, and figures to look at.
Losses = Callable[[Batch], tuple[torch.Tensor, dict[str, float]]]


class BatchSource(Protocol):
    """Gives the batch of each step, the same one whenever it is asked."""

    def batch(self, step: int) -> Batch: ...


@dataclass
class Progress:
    """What a checkpoint must remember besides tensors."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


def make_optimizers(model: torch.nn.Module, recipe: Training) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, which learn about twice as fast by it; AdamW for the rest."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if inner else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=recipe.matrix_rate, weight_decay=0.02, momentum=0.95)
    adam = torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def rate_at(share: float) -> float:
    """The learning rate's factor when a share of the budget is spent: up, flat, down."""
    if share < WARM_UP:
        return max(share / WARM_UP, 0.02)
    return min(1.0, max(0.0, (1.0 - share) / 0.6))


def token_losses(
    model: LlamaForCausalLM,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    wanted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Cross entropy at each token and, with a teacher's logits, KL and disagreement too."""
    logits = model(input_ids=inputs, use_cache=False).logits.float()
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    each = each.view_as(labels)
    return (each,) if wanted is None else (each, *disagreement(logits, wanted.float()))


def losses(
    model: LlamaForCausalLM,
    batch: Batch,
    teacher: LlamaForCausalLM | None,
    compute: Callable[..., tuple[torch.Tensor, ...]] = token_losses,
) -> tuple[torch.Tensor, dict[str, float]]:
    """What is minimised, and the plain losses of text and of multiplications to look at."""
    inputs, labels, weights = batch.ids[:, :-1], batch.ids[:, 1:], batch.weights[:, 1:]
    if teacher is None:
        (each,) = compute(model, inputs, labels)
        return (each * weights).sum() / weights.sum(), observed(each.detach(), batch)
    with torch.no_grad():
        wanted = teacher(input_ids=inputs, use_cache=False).logits
    each, kl, apart = compute(model, inputs, labels, wanted)
    seen = observed(each.detach(), batch)
    seen["overlap"] = 1.0 - float(apart.detach()[~batch.is_math].mean())
    return ((0.1 * each + 0.5 * kl + 1.5 * apart) * weights).sum() / weights.sum(), seen


def disagreement(
    logits: torch.Tensor, wanted: torch.Tensor, ids: torch.Tensor | slice = slice(None)
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL from the teacher, and the share of drafts that it would reject at low temperature.

    `ids`: the teacher's tokens that the logits are of; the KL is over these alone.
    """
    known = wanted[..., ids].log_softmax(-1)
    kl = F.kl_div(logits.log_softmax(-1), known, reduction="none", log_target=True).sum(-1)
    draft = (logits / DRAFT_TEMPERATURE).softmax(-1)
    target = (wanted / DRAFT_TEMPERATURE).softmax(-1)[..., ids]
    return kl, 1.0 - torch.minimum(draft, target).sum(-1)


def observed(each: torch.Tensor, batch: Batch) -> dict[str, float]:
    """Mean losses of the text rows and of the multiplications' answers."""
    seen = {}
    text = each[~batch.is_math]
    if text.numel():
        seen["text"] = float(text.mean())
    answers = batch.is_math[:, None] & (batch.weights[:, 1:] > 1.0)
    if bool(answers.any()):
        seen["math"] = float(each[answers].mean())
    return seen


def language_losses(
    model: LlamaForCausalLM, recipe: Recipe, teacher: LlamaForCausalLM | None = None
) -> Losses:
    """The losses of a language model, compiled if the recipe says so."""
    compute = token_losses
    if recipe.compile and has_compiler():  # a third faster after a minute
        if teacher is not None:
            teacher.compile(dynamic=False)
        compute = torch.compile(token_losses, dynamic=False)
    return partial(losses, model, teacher=teacher, compute=compute)


def has_compiler() -> bool:
    """Whether torch.compile can work here."""
    return any(shutil.which(name) for name in ("g++", "clang++"))


def train(
    model: torch.nn.Module,
    recipe: Training,
    batches: BatchSource,
    folder: Path,
    device: torch.device,
    losses: Losses,
    stop_at: int | None = None,
) -> Progress:
    """Train until the budget is spent, from the last checkpoint if there is one.

    Of several processes (ranks.py) the first one writes the checkpoints, which all read. `stop_at` ends the
    run early at that step, as a kill right after a checkpoint would.
    """
    model.to(device).train()
    optimizers = make_optimizers(model, recipe)
    stored = checkpoint.load(folder, model, optimizers)
    progress = Progress(**stored) if stored else Progress()
    before, begun, saved = progress.seconds, time.monotonic(), time.monotonic()
    while (share := spent(recipe, progress)) < 1.0:
        if stop_at is not None and progress.step >= stop_at:
            break
        batch = move(batches.batch(progress.step * ranks.world() + ranks.rank()), device)
        seen = one_step(model, optimizers, batch, losses, rate_at(share))
        progress.step += 1
        progress.tokens += batch.ids[:, 1:].numel() * ranks.world()
        progress.seconds = ranks.of_the_first(before + time.monotonic() - begun, device)
        if ranks.rank():
            continue
        if progress.step % LOG_EVERY == 0:
            note(progress, seen, recipe)
        if time.monotonic() - saved > SAVE_EVERY:
            checkpoint.save(folder, model, optimizers, vars(progress))
            saved = time.monotonic()
    if ranks.rank() == 0:
        checkpoint.save(folder, model, optimizers, vars(progress))
    return progress


def spent(recipe: Training, progress: Progress) -> float:
    """The share of the budget, of steps or of minutes, that is used up."""
    if recipe.steps is not None:
        return progress.step / recipe.steps
    return progress.seconds / (60.0 * recipe.minutes)


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch on the model's device."""
    return Batch(batch.ids.to(device), batch.weights.to(device), batch.is_math.to(device))


def one_step(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batch: Batch,
    losses: Losses,
    rate: float,
) -> dict[str, float]:
    """Forward, backward and update, at a factor of the peak learning rates."""
    with torch.autocast(batch.ids.device.type, dtype=torch.bfloat16):
        loss, seen = losses(batch)
    loss.backward()
    ranks.average_gradients(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"loss": float(loss.detach()), **seen}


def note(progress: Progress, seen: dict[str, float], recipe: Training) -> None:
    """Add a point to the curve and a line to the log."""
    point: dict[str, Any] = {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
    }
    point.update({name: round(value, 4) for name, value in seen.items()})
    progress.curve.append(point)
    speed = progress.tokens / max(progress.seconds, 1e-9)
    parts = " ".join(f"{name} {value:.3f}" for name, value in seen.items())
    print(
        f"{recipe.name}: {100 * spent(recipe, progress):5.1f} %  step {progress.step}  {parts}  "
        f"{speed:,.0f} tokens/s",
        file=sys.stderr,
        flush=True,
    )
