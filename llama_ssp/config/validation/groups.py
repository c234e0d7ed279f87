"""What the groups' values may be, each by itself."""

from __future__ import annotations

import re

from llama_ssp.config import SIZES, ModelConf, PlacementConf, RunConf, SamplingConfig, Splitting, Weights
from llama_ssp.config.validation.values import between
from llama_ssp.errors import UsageError

MAX_K = 64

MAX_SEED = 2**63 - 1

MEMORY = re.compile(r"\d+(\.\d+)? ?(KiB|MiB|GiB|KB|MB|GB)")

DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")


def check_sampling(sampling: SamplingConfig) -> None:
    if sampling.temperature != 0:  # a smaller divisor would turn logits into infinities
        between("sampling.temperature", sampling.temperature, 1e-5, 100.0, "0 means argmax")
    between("sampling.top_p", sampling.top_p, 0.0, 1.0, "1 turns it off", above=True)
    between("sampling.min_p", sampling.min_p, 0.0, 1.0, "0 turns it off")
    between("sampling.top_k", sampling.top_k, 0, 2**31 - 1, "0 turns it off")
    between("sampling.repetition_penalty", sampling.repetition_penalty, 0.01, 100.0, "1 turns it off")
    between("sampling.frequency_penalty", sampling.frequency_penalty, -100.0, 100.0)
    between("sampling.presence_penalty", sampling.presence_penalty, -100.0, 100.0)
    between("sampling.min_new_tokens", sampling.min_new_tokens, 0, 2**31 - 1)
    for token, bias in sampling.logit_bias.items():
        between("sampling.logit_bias key", token, 0, 2**31 - 1)
        fix = "to forbid a token use sampling.bad_tokens"
        between(f"sampling.logit_bias.{token}", bias, -1e4, 1e4, fix)
    for token in sampling.bad_tokens:
        between("sampling.bad_tokens entry", token, 0, 2**31 - 1)


def check_speculation(run: RunConf) -> None:
    spec = run.speculation
    between("speculation.k", spec.k, 0, MAX_K, "0 is plain decoding")
    between("speculation.k_max", spec.k_max, 1, MAX_K)
    if spec.cost_ratio is not None:
        between("speculation.cost_ratio", spec.cost_ratio, 0.0, 10.0, "null measures it")
    between("speculation.ngram_min", spec.ngram_min, 1, 32)
    between("speculation.ngram_max", spec.ngram_max, spec.ngram_min, 32)


def check_placement(placement: PlacementConf) -> None:
    for role in ("target", "draft"):
        asked = getattr(placement, f"{role}_device")
        if not DEVICE.fullmatch(asked):
            raise UsageError(
                f"placement.{role}_device names no device", found=repr(asked),
                allowed="auto, cpu, cuda, cuda:N", fix="correct it",
            )  # fmt: skip
    if placement.draft_degree is not None:
        between("placement.draft_degree", placement.draft_degree, 1, 4096)
    between("placement.timeout_s", placement.timeout_s, 1.0, 86400.0, "seconds; raise it for slow machines")
    between("placement.draft_timeout_s", placement.draft_timeout_s, 0.1, 86400.0, "seconds until it is lost")
    if placement.splitting is not Splitting.layers and (placement.max_memory or placement.offload_folder):
        raise UsageError(
            "placement.max_memory and offload_folder are for splitting by layers",
            found=f"placement.splitting={placement.splitting.value}", fix="use placement=layers",
        )  # fmt: skip
    for device, size in placement.max_memory.items():
        if not re.fullmatch(r"cpu|disk|\d{1,4}", str(device)) or not MEMORY.fullmatch(str(size)):
            raise UsageError(
                "a placement.max_memory entry cannot be read", found=f"{device}: {size}",
                allowed='a device index or cpu, and a size such as "20GiB"', fix="correct it",
            )  # fmt: skip


def check_model(role: str, model: ModelConf) -> None:
    least = 1 if model.weights is Weights.synthetic else 0
    for name in SIZES:
        between(f"{role}.{name}", getattr(model, name), least, 2**31 - 1)
    if model.sliding_window is not None:
        between(f"{role}.sliding_window", model.sliding_window, 1, 2**31 - 1, "null is none")
    if model.n_kv_heads and model.n_heads % model.n_kv_heads:
        raise UsageError(
            f"{role}.n_heads is not a multiple of {role}.n_kv_heads",
            found=f"{model.n_heads} and {model.n_kv_heads}",
            allowed="whole groups of query heads per KV head",
            fix="take the numbers from the model's config.json",
        )
    between(f"{role}.agreement", model.agreement, 0.0, 1.0)
    between(f"{role}.seed", model.seed, 0, MAX_SEED)
