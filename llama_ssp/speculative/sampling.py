"""From logits to the distribution that a token is drawn from: one code for target and draft.

The rules are exact for any two distributions. Controls on both make the committed tokens those of the target
under the controls, and a draft that has them, too, is accepted more often.

Shapes: B rows, W positions, V vocabulary, S token buffer. Position w of row b continues the first `length_BW`
tokens of that row's buffer. Every control depends on that prefix alone, so each of the K+1 positions of a
verification takes its own drafted tokens into account.

Order: bias and bans, penalties, temperature, top-k, top-p, min-p. Repetition counts the whole prefix;
frequency and presence count generated tokens only. Logits go to fp32 first (fp64 stays fp64).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from llama_ssp.config import Controls, SamplingConfig
from llama_ssp.models.graph_sizes import FILTERED
from llama_ssp.models.interface import log_slow
from llama_ssp.models.passes import sent
from llama_ssp.speculative.array_ops import Array, greatest, largest, where

LEAST_P = 1e-30  # a lower top_p keeps the same tokens, the likeliest, and is 0 in fp32 below 7e-46
PADDED = 1024  # a text's tokens are padded to multiples of it where a graph reads them: few sizes, few graphs
FEW = (256, 4096)  # the nucleus is sought among this many of the likeliest tokens before all are sorted


@dataclass(frozen=True)
class Prefix:
    """Holds the token buffer, how much of it each position continues, and where each prompt ends."""

    token_BS: Tensor
    length_BW: Tensor
    prompt_B: Tensor


class SamplingTransform:
    """Turns logits into probabilities under one set of sampling controls; a row may have its own."""

    def __init__(
        self,
        sampling: SamplingConfig,
        end_ids: tuple[int, ...],
        vocab: int,
        replay: Callable[..., Tensor] | None = None,
    ) -> None:
        """`vocab` is the target's; a draft's logits beyond it are cut, missing ones get probability 0.

        `replay` runs functions of tensors as CUDA graphs, where a model has them.
        """
        self.controls = sampling.controls
        self._replay = replay
        self.end_ids = tuple(i for i in end_ids if i < vocab)
        self.vocab = vocab
        self._by_row: dict[int, SamplingTransform] = {}  # rows with other controls
        self._sent: dict[object, Tensor] = {}  # what biases and bans add to the logits

    def assign(self, row: int, sampling: SamplingConfig) -> None:
        """Sets the row's controls."""
        controls = sampling.controls
        if controls == self.controls:
            self._by_row.pop(row, None)
            return

        # Rows with equal controls share a transform: they are then computed together.
        for transform in self._by_row.values():
            if transform.controls == controls:
                self._by_row[row] = transform
                return
        self._by_row[row] = SamplingTransform(
            sampling, end_ids=self.end_ids, vocab=self.vocab, replay=self._replay
        )

    def __call__(self, logit_BWV: Tensor, prefix: Prefix) -> Tensor:
        """Returns the probabilities at each position, (B, W, V). A row of NaN marks damaged logits."""
        transforms = [self._by_row.get(row, self) for row in range(len(logit_BWV))]
        if len(set(transforms)) == 1:
            return transforms[0]._by_graph(logit_BWV, prefix)
        if self._replay is not None:
            log_slow("rows with different settings", "give all texts the same ones (sampling.*)")
        return self._row_by_row(logit_BWV, prefix, transforms)

    def _by_graph(self, logit_BWV: Tensor, prefix: Prefix) -> Tensor:
        """Computes all rows under these controls, by a graph where there is one."""
        if self._replay is None or self._is_softmax or logit_BWV.numel() > FILTERED:
            return self._under_controls(logit_BWV, prefix)

        token_BS = prefix.token_BS
        given = [logit_BWV]
        if self._reads_prefix:
            padded_BS = torch.nn.functional.pad(token_BS, (0, -token_BS.shape[1] % PADDED))
            given += [padded_BS, prefix.length_BW, prefix.prompt_B]
        function = OfTensors(f"{self.controls} {self.end_ids} {self.vocab}", transform=self)

        # A copy: the next replay overwrites what this one gave.
        return self._replay(function, *given).clone()

    def _row_by_row(self, logit_BWV: Tensor, prefix: Prefix, transforms: list["SamplingTransform"]) -> Tensor:
        """Computes rows in groups that share their controls, and puts them back in order, (B, W, V)."""
        groups: dict[SamplingTransform, list[int]] = {}
        for row, transform in enumerate(transforms):
            groups.setdefault(transform, []).append(row)

        parts = []
        for transform, rows in groups.items():
            chosen = sent(rows, logit_BWV.device)
            group_prefix = Prefix(prefix.token_BS[chosen], prefix.length_BW[chosen], prefix.prompt_B[chosen])
            parts.append(transform._under_controls(logit_BWV[chosen], group_prefix))

        order = [row for rows in groups.values() for row in rows]  # order[i] is the row of part i
        back = sorted(range(len(order)), key=order.__getitem__)
        return torch.cat(parts)[sent(back, logit_BWV.device)]

    def _under_controls(self, logit_BWV: Tensor, prefix: Prefix) -> Tensor:
        """Returns the probabilities of rows that all have these controls, (B, W, V)."""
        wide = torch.promote_types(logit_BWV.dtype, torch.float32)
        logit_BWV = logit_BWV[..., : self.vocab].to(wide)
        probs_BWV = self._probs(logit_BWV, prefix)

        if self._may_hide_damage:
            damaged_BW1 = ~(logit_BWV.amax(-1, keepdim=True) < torch.inf)  # the maximum with NaN is NaN
            probs_BWV = probs_BWV.masked_fill(damaged_BW1, torch.nan)

        # Tokens that a draft lacks have probability 0: it never drafts them, and corrections bring them.
        missing = self.vocab - probs_BWV.shape[-1]
        return torch.nn.functional.pad(probs_BWV, (0, missing)) if missing else probs_BWV

    @property
    def forbids_all(self) -> bool:
        """Returns whether no token may begin a text."""
        banned = {*self.controls.bad_tokens, *(self.end_ids if self.controls.min_new_tokens else ())}
        return all(token in banned for token in range(self.vocab))

    @property
    def forbids(self) -> bool:
        """Returns whether a control of some row may forbid tokens."""
        return any(_forbids(transform.controls) for transform in (self, *self._by_row.values()))

    @cached_property
    def _reads_prefix(self) -> bool:
        c = self.controls
        penalises = c.repetition_penalty != 1 or c.frequency_penalty or c.presence_penalty
        return bool(penalises or c.min_new_tokens)

    @cached_property
    def _is_softmax(self) -> bool:
        """Returns whether one or two operations make the probabilities: a graph of them gains nothing."""
        c = self.controls
        moves = _forbids(c) or self._reads_prefix
        return not moves and c.temperature > 0 and (c.top_k, c.top_p, c.min_p) == (0, 1, 0)

    @cached_property
    def _may_hide_damage(self) -> bool:
        """Returns whether a control may make probabilities of damaged logits; a softmax alone gives NaN."""
        return _forbids(self.controls) or self._reads_prefix or self.controls.temperature == 0

    def _probs(self, logit_BWV: Tensor, prefix: Prefix) -> Tensor:
        controls = self.controls
        logit_BWV = self._penalised(self._biased(logit_BWV, prefix), prefix)

        if controls.temperature == 0:
            # Greedy is a distribution like any other: certain of the likeliest token, the first of equals.
            # With such p and q both rules keep the drafts before the first that is not the target's choice,
            # and the correction is that choice.
            chosen_BWV = one_hot(logit_BWV.argmax(-1), logit_BWV)
            nothing_BW1 = logit_BWV.amax(-1, keepdim=True) == -torch.inf  # every token is forbidden
            return chosen_BWV.masked_fill(nothing_BW1, torch.nan) if _forbids(controls) else chosen_BWV

        warm_BWV = logit_BWV if controls.temperature == 1 else logit_BWV / controls.temperature
        probs_BWV = torch.softmax(warm_BWV, -1)
        kept_BWV: Tensor = filtered(probs_BWV, controls.top_k, controls.top_p, controls.min_p)
        return kept_BWV

    def _biased(self, logit_BWV: Tensor, prefix: Prefix) -> Tensor:
        """Returns the logits with biases; -inf for what is banned, here or everywhere."""
        controls = self.controls

        if controls.logit_bias or controls.bad_tokens:
            banned = dict.fromkeys(controls.bad_tokens, -torch.inf)
            logit_BWV = logit_BWV + self._by_token({**controls.logit_bias, **banned}, logit_BWV)

        if controls.min_new_tokens and self.end_ids:
            # Each position counts its own tokens, drafts included: one block may cross the minimum.
            early_BW1 = (prefix.length_BW - prefix.prompt_B[:, None] < controls.min_new_tokens)[..., None]
            ends_V = self._by_token(dict.fromkeys(self.end_ids, 1.0), logit_BWV) > 0
            logit_BWV = logit_BWV.masked_fill(early_BW1 & ends_V, -torch.inf)

        return logit_BWV

    def _by_token(self, numbers: Mapping[int, float], like_BWV: Tensor) -> Tensor:
        """Returns the numbers of all tokens, (V,), of others 0; they are sent to a device once."""
        width = like_BWV.shape[-1]
        key = tuple(numbers.items()), width, like_BWV.dtype, like_BWV.device
        if key not in self._sent:
            number_V = torch.zeros(width, dtype=like_BWV.dtype)
            for token, number in numbers.items():
                if token < width:
                    number_V[token] = number
            self._sent[key] = sent(number_V, like_BWV.device)
        return self._sent[key]

    def _penalised(self, logit_BWV: Tensor, prefix: Prefix) -> Tensor:
        """Returns the logits, changed for tokens that each position's prefix has."""
        controls = self.controls
        width = logit_BWV.shape[-1]

        penalty = controls.repetition_penalty
        if penalty != 1:
            # As it is defined (Keskar et al. 1909.05858): positive logits are divided, others multiplied.
            seen_BWV = token_counts(prefix, width, generated_only=False) > 0
            scaled_BWV = torch.where(logit_BWV > 0, logit_BWV / penalty, logit_BWV * penalty)
            logit_BWV = torch.where(seen_BWV, scaled_BWV, logit_BWV)

        if controls.frequency_penalty or controls.presence_penalty:
            count_BWV = token_counts(prefix, width, generated_only=True).to(logit_BWV.dtype)
            logit_BWV = logit_BWV - controls.frequency_penalty * count_BWV
            logit_BWV = logit_BWV - controls.presence_penalty * count_BWV.clamp(max=1)

        return logit_BWV


@dataclass(frozen=True)
class OfTensors:
    """Makes a transform a function of tensors alone: logits and, where a control reads it, the prefix.

    Transforms with the same settings are equal, so that they share a graph.
    """

    settings: str
    transform: SamplingTransform = field(compare=False)

    def __call__(
        self,
        logit_BWV: Tensor,
        token_BS: Tensor | None = None,
        length_BW: Tensor | None = None,
        prompt_B: Tensor | None = None,
    ) -> Tensor:
        if token_BS is None or length_BW is None or prompt_B is None:
            # No control reads the prefix, whose place these tensors fill.
            prefix = Prefix(token_BS=logit_BWV, length_BW=logit_BWV, prompt_B=logit_BWV)
        else:
            prefix = Prefix(token_BS=token_BS, length_BW=length_BW, prompt_B=prompt_B)
        return self.transform._under_controls(logit_BWV, prefix)


def _forbids(controls: Controls) -> bool:
    """Returns whether tokens may be forbidden."""
    return bool(controls.bad_tokens or controls.logit_bias or controls.min_new_tokens)


def filtered(probs: Array, top_k: int, top_p: float, min_p: float) -> Array:
    """Returns probabilities cut by top-k, then top-p, then min-p, each renormalised.

    Each filter is a threshold on probability: tied tokens are kept or dropped together, and the order of
    tokens does not matter. A draft is drawn from what is left, and declares that.
    """
    if 0 < top_k < probs.shape[-1]:
        probs = _kept(probs, greatest(probs, top_k)[..., -1:])
    if top_p < 1:
        probs = _kept(probs, _nucleus_edge(probs, max(top_p, LEAST_P)))
    if min_p > 0:
        probs = _kept(probs, largest(probs) * min_p)
    return probs


def likeliest(probs: Array, count: int | None) -> Array:
    """Returns the probabilities of the `count` likeliest tokens alone, renormalised; of all with None.

    It makes the law that a draft is drawn from and declares (`speculation.draft_top`). Of tokens that tie at
    the last place those with lower ids are kept: so every device keeps the same ones, and never more than
    `count`. (Filters keep tied tokens together: the target's law must not depend on the order of tokens.)
    """
    if count is None or count >= probs.shape[-1]:
        return probs

    edge = greatest(probs, count)[..., -1:]  # the probability of the last place
    above = probs > edge
    kept = probs == edge
    kept = kept & (kept.cumsum(-1) <= count - above.sum(-1, keepdims=True))  # the first of the tied ones

    cut = where(kept | above, probs, 0)
    return cut / cut.sum(-1, keepdims=True)  # NaN where the probabilities are


def _nucleus_edge(probs: Array, top_p: float) -> Array:
    """Returns the least probability of the nucleus, the fewest likeliest tokens that together have `top_p`.

    A few of the likeliest tokens are tried first. They are enough if their sum exceeds `top_p` by more than
    rounding. Their sums are the same as among all tokens, as a CPU adds one after the other; on a GPU all are
    sorted, since the check would make the host wait.
    """
    size = probs.shape[-1]
    counts = [size]
    if isinstance(probs, torch.Tensor) and probs.device.type == "cpu":
        counts = [*(few for few in FEW if few < size // 4), size]

    for count in counts:
        down = greatest(probs, count)  # likeliest first
        rising = down.cumsum(-1)
        if count == size or bool((rising[..., -1] - 8 * torch.finfo(probs.dtype).eps >= top_p).all()):
            break

    # A token is inside if those likelier than it do not have `top_p` yet: rising - down is their sum.
    inside = where(rising - down < top_p, down, 1)  # 1: not in the nucleus
    return -largest(-inside)  # the least of them


def _kept(probs: Array, threshold: Array) -> Array:
    """Returns the probabilities of at least `threshold`, which is (..., 1), renormalised."""
    cut = where(probs >= threshold, probs, 0)
    return cut / cut.sum(-1, keepdims=True)


def has_nan(probs_BWV: Tensor) -> Tensor:
    """Returns which positions had damaged logits, (B, W): all of their row is NaN."""
    return probs_BWV[..., 0].isnan()


def one_hot(token: Tensor, like: Tensor) -> Tensor:
    """Returns the distribution that is certain of `token`, in the dtype and width of `like`."""
    return torch.zeros_like(like).scatter_(-1, token[..., None], 1.0)


def token_counts(prefix: Prefix, width: int, generated_only: bool) -> Tensor:
    """Returns how often each token stands in each position's prefix: (B, W, V)."""
    rows, positions = prefix.length_BW.shape

    # Position w of row b continues the slots below length_BW[b, w], of which the prompt has the first.
    slot_S = torch.arange(prefix.token_BS.shape[1], device=prefix.token_BS.device)
    inside_BWS = slot_S < prefix.length_BW[..., None]
    if generated_only:
        inside_BWS = inside_BWS & (slot_S >= prefix.prompt_B[:, None, None])

    # A text may hold tokens that these logits lack; they count for none.
    known_BS = prefix.token_BS < width
    token_BWS = prefix.token_BS.clamp(max=width - 1)[:, None].expand(-1, positions, -1)
    counted_BWS = (inside_BWS & known_BS[:, None]).to(torch.int32)
    count_BWV = torch.zeros(rows, positions, width, dtype=torch.int32, device=token_BWS.device)
    return count_BWV.scatter_add_(2, token_BWS, counted_BWS)
