"""Faults of the rules and of drafters, which the enumerations of tests/proofs must show (mutants.py).

Controls of the exact tests: each makes the distribution of a round (in fractions) or of whole texts (in fp64)
another one than the target's. A method of `Rule` is given the rule, the block, and some how many drafts
stand.
"""

from dataclasses import replace
from itertools import accumulate

import torch

from llama_ssp.models.attention import attend_rows
from llama_ssp.models.passes import Pass, RowSpan
from llama_ssp.speculative.array_ops import joined, order, pick, row_by_row, smaller, where
from llama_ssp.speculative.drafters.local import nothing
from llama_ssp.speculative.sampling import filtered, likeliest
from llama_ssp.speculative.state import Proposal
from llama_ssp.speculative.verification import BlockRule, TokenRule
from llama_ssp.text.translation import NONE
from tests.proofs.mutants import chosen, fault, proof, walked
from tests.tongues import bridge

RULES = "speculative.verification:"
CHANCES = f"{RULES}TokenRule.accept_chances {RULES}BlockRule.accept_chances"
CORRECTION = f"{RULES}TokenRule.correction_probs {RULES}BlockRule.correction_probs"
BY_BLOCK = proof("proofs.test_verify_exact", "test_random_pairs", "block")
EXACT = proof("proofs.test_verify_exact", "test_random_pairs", "token"), BY_BLOCK


@chosen
def of_other_laws(laws, chances, rule, block):
    """The chances of a block whose target and draft have the distributions `laws(block)`."""
    target_BWV, draft_BKV = laws(block)
    return chances(rule, replace(block, target_BWV=target_BWV, draft_BKV=draft_BKV))


def within(block, chance_BK):
    return where(block.count_B[:, None] > order(chance_BK), chance_BK, 0)


fault("ratio swapped", CHANCES, *EXACT)(
    of_other_laws(lambda block: (block.draft_BKV[:, [*range(block.k), 0]], block.target_BWV[:, : block.k]))
)
fault("draft's distribution of the position before", CHANCES, *EXACT)(
    of_other_laws(lambda block: (block.target_BWV, block.draft_BKV[:, [0, *range(block.k - 1)]]))
)
fault("lenience of 5 %", CHANCES, *EXACT)(
    lambda chances, *of: smaller(chances(*of) * 21 / 20, chances(*of) * 0 + 1)
)
fault("accepts always", CHANCES, *EXACT)(
    lambda chances, rule, block: within(block, chances(rule, block) * 0 + 1)
)
fault("accepts only where the target is surer", CHANCES, *EXACT)(lambda chances, *of: chances(*of) // 1)
fault("block: h = P everywhere", f"{RULES}BlockRule.accept_chances", BY_BLOCK)(
    lambda _, rule, block: within(block, block.carried_BW[:, 1:])
)
fault("block: P forgets what came before", f"{RULES}DraftBlock.carried_BW", BY_BLOCK)(
    lambda _, block: joined(block.target_BWV[:, :1, 0] * 0 + 1, TokenRule().accept_chances(block))
)
fault("block: stops at the first failure", f"{RULES}BlockRule.accepted", BY_BLOCK)(
    lambda _, rule, passed_BK: TokenRule().accepted(passed_BK)
)
fault("block: the token rule's residual", f"{RULES}BlockRule.correction_probs", BY_BLOCK)(
    lambda _, rule, *of: TokenRule().correction_probs(*of)
)


@chosen
def residual(shape, _, rule, block, accepted_B):
    """What remains is `shape(weight * target, draft, the rejected token)`, normalised."""
    target_BV = row_by_row(block.target_BWV, accepted_B)
    last_B = smaller(accepted_B, accepted_B * 0 + block.k - 1)
    weight_B = row_by_row(block.carried_BW, accepted_B) if isinstance(rule, BlockRule) else accepted_B * 0 + 1
    drafted_B1 = pick(block.drafted_BK, last_B[:, None], 1)
    rest_BV = shape(weight_B[:, None] * target_BV, row_by_row(block.draft_BKV, last_B), drafted_B1)
    mass_B1 = rest_BV.sum(-1, keepdims=True)
    whole_B1 = (accepted_B == block.count_B)[:, None] | (mass_B1 == 0)
    return where(whole_B1, target_BV, rest_BV / where(mass_B1 == 0, 1, mass_B1))


fault("residual: the target's own distribution", CORRECTION, *EXACT)(residual(lambda p, q, _: p))
fault("residual |p - q|", CORRECTION, *EXACT)(residual(lambda p, q, _: abs(p - q)))
fault("residual p - q, not clamped at zero", f"{RULES}excess", *EXACT)(lambda _, weight, p, q: weight * p - q)
fault("residual max(q - p, 0)", CORRECTION, *EXACT)(residual(lambda p, q, _: (q - p).clip(0)))
fault("residual masks the rejected token", CORRECTION, *EXACT)(
    residual(lambda p, _, rejected: where(order(p) == rejected, 0, p))
)


@chosen
def bonus(of, correction_probs, rule, block, accepted_B):
    """After a whole block comes the distribution of the position before."""
    probs_BV = correction_probs(rule, block, accepted_B)
    early_BV = row_by_row(getattr(block, of), where(accepted_B > 0, accepted_B - 1, 0))
    return where((accepted_B == block.count_B)[:, None], early_BV, probs_BV)


fault("bonus token from the draft", CORRECTION, *EXACT)(bonus("draft_BKV"))
fault("bonus token one position early", CORRECTION, *EXACT)(bonus("target_BWV"))

# Drafters: what they declare is not what they drew from, or not all that was drawn is submitted.

DRAFTERS = "speculative.drafters."
MODEL, NGRAMS = f"{DRAFTERS}local:ModelDrafter.propose", f"{DRAFTERS}ngram:NgramDrafter.propose"
BRIDGED = f"{DRAFTERS}cross_vocab:IntersectionDrafter.propose"
OVERLAPPING, TWO_FOR_ONE = "overlapping", "two draft tokens for one"  # pairs of tokenizers


@chosen
def declares(change, propose, *given):
    proposal = propose(*given)
    return proposal if proposal.draft_BKV is None else replace(proposal, draft_BKV=change(proposal.draft_BKV))


@chosen
def submits(count, propose, drafter, state, *given):
    """Looks at what was drawn, and submits only `count(proposal)` of it."""
    proposal = propose(drafter, state, *given)
    kept = proposal.count if proposal.draft_BKV is None else tuple(count(proposal))
    k = max(kept)
    return Proposal(proposal.drafted_BK[:, :k], proposal.draft_BKV[:, :k], kept) if k else nothing(state)


def shared(name):
    """The target's ids of the tokens that the draft has, too, in the draft's order."""
    return [token for token in bridge(name).match.target_of if token != NONE]


fault("declared distribution is 5 % uniform", MODEL, walked("plain"))(
    declares(lambda q: 0.95 * q + 0.05 / q.shape[-1])
)
fault("looked-up draft declared uniform", NGRAMS, walked("n-gram drafts"))(
    declares(lambda q: torch.ones_like(q) / q.shape[-1])
)
fault("draft tokens that are one counted twice", BRIDGED, walked(f"Intersection, {TWO_FOR_ONE}"))(
    declares(lambda q: q * torch.tensor(shared(TWO_FOR_ONE)).bincount(minlength=q.shape[-1]))
)


@fault("drops an unlikely draft after looking", MODEL, walked("plain", "token"))
@submits
def _(proposal):
    chosen_BK = pick(proposal.draft_BKV, proposal.drafted_BK[..., None], 2)[..., 0]
    return [n - 1 if n and float(chosen_BK[row, n - 1]) < 0.5 else n for row, n in enumerate(proposal.count)]


@fault("K chosen after seeing the last draft", "speculative.engine:Engine.draft", walked("plain", "token"))
@submits
def _(proposal):
    certain_B = proposal.drafted_BK[:, -1] == proposal.draft_BKV[:, -1].argmax(-1)
    return [n if bool(ok) or n < 2 else 1 for n, ok in zip(proposal.count, certain_B, strict=True)]


@fault("shared tokens scattered in the order of ids", BRIDGED, walked(f"Intersection, {OVERLAPPING}"))
@declares
def _(probs):
    tokens, wrong = shared(OVERLAPPING), torch.zeros_like(probs)
    wrong[..., sorted(tokens)] = probs[..., tokens]
    return wrong


@fault("distribution over shared tokens not renormalised", BRIDGED, walked(f"Intersection, {OVERLAPPING}"))
@declares
def _(probs):
    alone, kept = set(range(probs.shape[-1])) - set(shared(OVERLAPPING)), 0.7 * probs
    kept[..., min(alone)] += 0.3  # what the draft gave to tokens of its own
    return kept


# Drafts from the likeliest tokens alone: what is drawn from and what is declared are cut differently, or the
# target's law is cut, too.

DRAWS = f"{DRAFTERS}local:Sampler.draw"
LIKELIEST = walked("likeliest tokens"), walked("likeliest tokens", "token")
CERTAIN = walked("likeliest tokens, the first alone")
TIED = proof("test_sampling", "test_of_tied_tokens_those_with_lower_ids_are_the_likeliest")


@fault("likeliest tokens: drawn from, and all tokens declared", DRAWS, *LIKELIEST)
def _(draw, sampler, state, offset, count, logit_BV, *slot):
    drawn = draw(sampler, state, offset, count, logit_BV, *slot)
    whole_BV = sampler.transform(logit_BV[:, None], state.prefix(offset, 1))[:, 0]
    return replace(drawn, probs_BV=whole_BV)


@fault("likeliest tokens: declared, and drawn from all tokens", DRAWS, CERTAIN)
def _(draw, sampler, *given):
    drawn = draw(replace(sampler, top=None), *given)
    return replace(drawn, probs_BV=likeliest(drawn.probs_BV, sampler.top))


@fault("likeliest tokens: cut a second time, to one fewer", DRAWS, *LIKELIEST)
def _(draw, sampler, *given):
    drawn = draw(sampler, *given)
    return replace(drawn, probs_BV=likeliest(drawn.probs_BV, max(1, (sampler.top or 9) - 1)))


fault("likeliest tokens: of the target, too", "speculative.engine:decide", *LIKELIEST)(
    lambda decide, rule, draws, target_BWV, *given: decide(rule, draws, likeliest(target_BWV, 2), *given)
)
fault("likeliest tokens: tied ones stay together", "speculative.sampling:likeliest", TIED)(
    lambda _, probs, count: filtered(probs, count, 1.0, 0.0)
)

# Trained heads.

HEAD, BLOCK_HEAD = f"{DRAFTERS}head:HeadDrafter.", f"{DRAFTERS}head:BlockHeadDrafter."
STEP, SOME = "models.heads.model:Eagle3Model.step", f"{DRAFTERS}local:Sampler.draw"
FORMULAS = "test_heads", "test_declared_distributions_are_the_published_formulas"
PUBLISHED, REDUCED = proof(*FORMULAS, "speculators"), proof(*FORMULAS, "reduced vocabulary")
DFLASH = proof(*FORMULAS, "DFlash")


@fault("DFlash: states of a rejected draft stay", f"{BLOCK_HEAD}observe", DFLASH)
@fault("head: states of a rejected draft stay", f"{HEAD}observe", PUBLISHED)
def _(observe, drafter, token_BS, fed, state_TX):
    seen = vars(drafter).setdefault("first_states", {})
    places = [(row, start + i) for row, start, count in fed for i in range(count)]
    kept = [seen.setdefault(*each) for each in zip(places, state_TX.clone(), strict=True)]
    observe(drafter, token_BS, fed, torch.stack(kept))


@fault("head: its own guess where the target's states are known", STEP, PUBLISHED)
def _(step, model, token_T, g_TH, pass_, cache):
    last = [end - 1 for end in accumulate(span.tokens for span in pass_.spans)]
    ends = tuple(RowSpan(row, start + count - 1, 1) for row, start, count in pass_.spans)
    return step(model, token_T[last], g_TH[last], Pass(spans=ends, device=pass_.device), cache)


@fault("head: the next draft reads the last state again", STEP, PUBLISHED)
def _(step, model, token_T, g_TH, pass_, cache):
    first = vars(model).get("first_g", g_TH[:0])
    if first.shape == g_TH.shape and all(span.tokens == 1 for span in pass_.spans):
        g_TH = first
    vars(model)["first_g"] = g_TH[-len(pass_.spans) :]
    return step(model, token_T, g_TH, pass_, cache)


@fault("head: tokens that it lacks keep their share", SOME, REDUCED)
def _(draw, sampler, state, offset, count, logit_BV, *slot):
    lacking_B1 = (logit_BV == -torch.inf).double().mean(-1, keepdim=True)
    drawn = draw(sampler, state, offset, count, logit_BV, *slot)
    return replace(drawn, probs_BV=drawn.probs_BV * (1 - 0.5 * lacking_B1))


fault("head: d2t off by one", SOME, REDUCED)(
    lambda draw, sampler, state, offset, count, logit_BV, *slot: draw(
        sampler, state, offset, count, logit_BV.roll(1, -1), *slot
    )
)
fault("head: declares what was before the temperature", f"{HEAD}propose", walked("head, every control"))(
    declares(lambda q: q**2.5 / (q**2.5).sum(-1, keepdim=True))
)
fault("DFlash: the block is causal", "models.attention:attend_blocks", DFLASH)(
    lambda _, *of: attend_rows(*of)
)
fault("DFlash: drafts one place on", "models.heads.model:DFlashModel.logits", DFLASH)(
    lambda logits, *of: logits(*of).roll(1, 1)
)

# Assistants that read the target's cache.

ASSISTANT, PLACES = f"{DRAFTERS}head:AssistantDrafter.", "models.heads.model:AssistantModel.places"
BY_MODULES = "test_assistants", "test_declared_distributions_are_those_of_transformers"
DECLARED = proof(*BY_MODULES, "all tokens", "gemma4")


fault("assistant: sees a token that the target has not kept", PLACES, DECLARED)(
    lambda places, model, texts, cache, behind: places(model, texts, cache, behind=1)
)
fault("assistant: reads the target's cache one token late", PLACES, DECLARED)(
    lambda places, model, texts, cache, behind: places(model, texts, cache, behind=3 if behind == 2 else 1)
)


@fault("assistant: its position moves on within a round", PLACES, DECLARED)
def _(places, model, texts, cache, behind):
    if behind == 1:
        known = vars(model).setdefault("known_texts", [])
        moved = known.count(texts)
        known.append(texts)
        texts = [(row, min(length + moved, cache.capacity)) for row, length in texts]
    return places(model, texts, cache, behind)


@fault("assistant: the state of the last draft, not of the accepted one", f"{ASSISTANT}observe", DECLARED)
def _(observe, drafter, token_BS, fed, state_TX):
    lasts = list(accumulate(count for _, _, count in fed))
    last_T = [last - 1 for (_, _, count), last in zip(fed, lasts, strict=True) for _ in range(count)]
    observe(drafter, token_BS, fed, state_TX[last_T])


@fault("assistant: a window begins a token late", "models.heads.layers:ReadingAttention.remember", DECLARED)
def _(remember, attention, x_TH, turns, cache, places):
    if attention.scores.window is not None:
        attention.scores = replace(attention.scores, window=1)
    return remember(attention, x_TH, turns, cache, places)


CONTROLLED = walked("assistant, every control")
fault("assistant: declares what was before the temperature", f"{ASSISTANT}propose", CONTROLLED)(
    declares(lambda q: q**2.5 / (q**2.5).sum(-1, keepdim=True))
)

# Drafts of other ranks (drafting ahead).

AHEAD, OVERLAP = f"{DRAFTERS}ahead:", "proofs.test_overlap"
MERGED = proof(OVERLAP, "test_rows_of_two_memos_are_merged_whole")
MEMO = proof(OVERLAP, "test_a_memo_stands_for_its_own_prompt_and_text_alone")
ARRIVE = proof(OVERLAP, "test_probabilities_arrive_to_the_last_bit", 0, torch.float32)
FEW_ARRIVE = proof(OVERLAP, "test_the_likeliest_probabilities_arrive_to_the_last_bit", 19, torch.float32)
fault("merged drafts have the second one's tokens", f"{AHEAD}merged", MERGED)(
    lambda merged, first, one, other: replace(merged(first, one, other), token_B=other.token_B)
)
fault("merged drafts have the second one's probabilities", f"{AHEAD}merged", MERGED)(
    lambda merged, first, one, other: replace(merged(first, one, other), probs_BV=other.probs_BV)
)
fault("a memo stands whatever its prompt", f"{AHEAD}Memo.stands", MEMO)(
    lambda _, memo, state, row: state.texts[row] == memo.state.texts[row]
)
fault("tiny probabilities of a draft on other ranks are not sent", f"{DRAFTERS}remote:written", ARRIVE)(
    lambda written, probs_BKV, *top: written(probs_BKV.where(probs_BKV > 1e-9, 0), *top)
)
fault("likeliest tokens: renormalised again when they arrive", f"{DRAFTERS}remote:read", FEW_ARRIVE)(
    lambda read, *of: read(*of) / read(*of).sum(-1, keepdim=True)
)
