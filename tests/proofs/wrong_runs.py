"""Faults of caches, passes, texts, sampling controls, random numbers and codes (mutants.py lists them).

Controls of the walked runs (a total variation above 1e-12), of the enumerated counters of random numbers, and
of single tests that compare with another implementation.
"""

from dataclasses import replace
from types import SimpleNamespace

import torch

from llama_ssp.config import Controls, SamplingConfig
from llama_ssp.models.sharding import COLUMNS, Cut
from llama_ssp.speculative.rng import RACES, ROUNDS, Purpose
from llama_ssp.speculative.sampling import FEW, Prefix, SamplingTransform
from tests.proofs.mutants import chosen, fault, proof, walked

PLAIN = walked("plain")
VISIBLE, STATE = "models.passes:Pass.visible", "speculative.state:State."


@fault("stale keys of rejected tokens", "models.causal_lm:ModuleCache.update", PLAIN)
def _(update, view, *given, **how):
    """Slots that were written once stay as they are."""
    stored, first = update(view, *given, **how), vars(view.cache).setdefault("first", {})
    for part in stored:
        old = first.get(part.data_ptr(), part[:, :, :0])
        both = min(old.shape[2], part.shape[2])
        is_old = old[:, :, :both].abs().sum((1, 3), keepdim=True) > 0
        part[:, :, :both] = torch.where(is_old, old[:, :, :both], part[:, :, :both])
        first[part.data_ptr()] = torch.cat([part, old[:, :, both:]], 2)
    return stored


@fault("positions one too late", "models.passes:Pass.position_BW", PLAIN)
def _(position_BW, pass_):
    tokens_B1 = torch.tensor([[span.tokens] for span in pass_.spans])
    return torch.where(torch.arange(pass_.width) < tokens_B1, position_BW(pass_) + 1, 0)


fault("mask sees one slot ahead", VISIBLE, PLAIN)(
    lambda visible, pass_, rule: visible(pass_, lambda position: rule(position + 1))
)


# Recurrent states: each fault does what an engine was found to do, or might. A layer's memory is changed
# before or after its pass, as if it had read or written other places.

LINEAR = "models.delta:DeltaNet.forward"
HYBRID = walked("hybrid, long block")
HYBRID_ROWS = walked("hybrid, two ragged rows with EOS")
WITHOUT_DRAFTS = walked("hybrid, rounds with and without drafts")
REFILLED_STATES = proof("test_hybrid", "test_a_refilled_row_begins_without_a_state")
OTHER_LENGTH = proof("test_hybrid", "test_a_text_that_parts_from_the_one_before_it_begins_anew")


def rings(cache, places):
    """Of each row that is fed: its number, its first position, its tokens; then both rings, by rows."""
    inputs_MC, states_SHDE, _ = cache
    size = inputs_MC.shape[0] * places.ring // states_SHDE.shape[0]
    spans = [(first // places.capacity, start, count) for first, start, count in places.rows]
    states_RP = states_SHDE.view(-1, places.ring, *states_SHDE.shape[1:])
    return spans, inputs_MC.view(-1, size, inputs_MC.shape[1]), states_RP


def ends_of(net, spans):
    """How many tokens each row had been fed before this pass; notes how many it has after it."""
    ends = vars(net).setdefault("ends", {})
    before = {row: ends.get(row, start) for row, start, _ in spans}
    ends.update({row: start + count for row, start, count in spans})
    return before


@fault("states: a round without drafts leaves the state before it", LINEAR, WITHOUT_DRAFTS)
def _(forward, net, x, turns, cache, places):
    kept = cache[1].clone()
    read = forward(net, x, turns, cache, places)
    if all(count == 1 for _, _, count in places.rows):
        cache[1].copy_(kept)
    return read


@fault("states: the one after all drafts counts, not the accepted one", LINEAR, HYBRID)
def _(forward, net, x, turns, cache, places):
    spans, _, states_RP = rings(cache, places)
    for row, end in ends_of(net, spans).items():
        start = next(start for each, start, _ in spans if each == row)
        if end > start > 0:
            states_RP[row, (start - 1) % places.ring] = states_RP[row, (end - 1) % places.ring]
    return forward(net, x, turns, cache, places)


@fault("states: the convolution's tail is not rolled back", LINEAR, HYBRID)
def _(forward, net, x, turns, cache, places):
    spans, inputs_RP, _ = rings(cache, places)
    size = inputs_RP.shape[1]
    for row, end in ends_of(net, spans).items():
        start = next(start for each, start, _ in spans if each == row)
        if end > start > 0:
            last = [inputs_RP[row, (end - back) % size].clone() for back in range(1, net.tail + 1)]
            for back, held in enumerate(last, start=1):
                inputs_RP[row, (start - back) % size] = held
    return forward(net, x, turns, cache, places)


@fault("states: all rows go back as far as the first", LINEAR, HYBRID_ROWS)
def _(forward, net, x, turns, cache, places):
    spans, _, states_RP = rings(cache, places)
    ends = ends_of(net, spans)
    if len(spans) > 1 and all(start for _, start, _ in spans):
        back = ends[spans[0][0]] - spans[0][1]
        for row, start, _ in spans[1:]:
            wrong = max(ends[row] - back, 1)
            states_RP[row, (start - 1) % places.ring] = states_RP[row, (wrong - 1) % places.ring]
    return forward(net, x, turns, cache, places)


@fault("states: a verify pass runs on scratch caches", LINEAR, HYBRID)
def _(forward, net, x, turns, cache, places):
    is_verify = any(start and count > 1 for _, start, count in places.rows)
    scratch = [tensor.clone() for tensor in cache] if is_verify else cache
    return forward(net, x, turns, scratch, places)


@fault("states: a refilled row begins with those of the text before", LINEAR, REFILLED_STATES)
def _(forward, net, x, turns, cache, places):
    spans, inputs_RP, _ = rings(cache, places)
    both = places.ring * inputs_RP.shape[1]  # after so many positions, places in both rings are the same
    used = vars(net).setdefault("used", set())
    rows = [
        (first, both if start == 0 and row in used else start, count)
        for (row, start, count), (first, _, _) in zip(spans, places.rows, strict=True)
    ]
    used.update(row for row, _, _ in spans)
    return forward(net, x, turns, cache, replace(places, rows=tuple(rows)))


@fault(
    "states: a chat goes on from a state of another length",
    "models.kv_cache:KVCache.resumable models.kv_cache:KVCache.feed",
    OTHER_LENGTH,
)
def _(_kept, _cache, *given):
    """Any length will do, and nothing is noted."""
    return given[-1] if len(given) == 2 else None


# Texts: what ends them, what is told of broken ones, what stays of those before.

TRIM, BLOCK_END = "speculative.generate:Limits.trim", walked("EOS inside the block")
STOP_AT_END = proof("test_loop", "test_a_stop_string_is_not_sought_in_the_end_token")
DAMAGED = proof("test_loop", "test_damaged_logits_stop_their_row_only", "draft", "token")
DRAFTERS = "speculative.drafters."
MENDED = proof("test_bridged", "test_damaged_logits_are_noticed")
ARRIVED = proof("proofs.test_overlap", "test_probabilities_arrive_to_the_last_bit", 0, torch.float32)
REFILLED = proof("test_logprobs", "test_a_refilled_row_has_those_of_its_own_text")
PADDING = proof("test_logprobs", "test_padding_of_the_vocabulary_takes_no_part")
STALE = proof("test_logprobs", "test_a_text_that_parts_from_the_one_before_it_reads_no_stale_keys", 5)


@fault("an end is seen only at a block's end", TRIM, BLOCK_END, walked("stop sequence across blocks"))
def _(trim, limits, state, row, tokens, context):
    kept, reason = trim(limits, state, row, tokens, context)
    return (len(tokens), None) if kept < len(tokens) else (kept, reason)


@fault("stop strings are shown the end token", TRIM, STOP_AT_END)
def _(trim, limits, state, row, tokens, context):
    ends = [i for i, token in enumerate(tokens) if token in limits.end_ids]
    stopped = limits.text_end.kept(row, tokens[: ends[0] + 1] if ends else tokens, False)
    bare = replace(limits, text_end=None)
    return trim(bare, state, row, tokens, context) if stopped is None else (stopped, "stop")


@fault("a damaged draft is not reported", "speculative.engine:decide", DAMAGED)
def _(decide, rule, draws, target, draft, *given):
    return decide(rule, draws, target, draft.nan_to_num(1.0), *given)


@fault("a refilled row keeps the log-probabilities before", f"{STATE}replace", REFILLED)
def _(replaced, state, row, prompt):
    before = state.logprobs[row]
    replaced(state, row, prompt)
    state.logprobs[row] = before


@fault("a conversation keeps one cached token too many", "speculative.model_runner:ModelRunner.refill", STALE)
def _(refill, runner, token_BS, lengths, kept):
    return refill(runner, token_BS, lengths, {row: count + 1 for row, count in kept.items() if count})


@fault("broken drafts of another tokenizer are mended", f"{DRAFTERS}local:Sampler.draw", MENDED)
def _(draw, *given):
    drawn = draw(*given)
    return replace(drawn, probs_BV=drawn.probs_BV.nan_to_num(1.0))


fault("broken drafts of other ranks are mended", f"{DRAFTERS}remote:written", ARRIVED)(
    lambda written, probs_BKV, *top: written(probs_BKV.nan_to_num(1.0), *top)
)
fault("padding of the vocabulary has log-probabilities", "speculative.logprobs:LogprobReader.read", PADDING)(
    lambda read, reader, logits, probs, _, *of: read(reader, logits, probs, logits.shape[-1], *of)
)

# The controls of sampling.

CONTROLS, FILTERS = "speculative.sampling:SamplingTransform.__call__", "speculative.sampling:filtered"
SAMPLING = "test_sampling"
BY_ROW = proof(SAMPLING, "test_each_row_of_a_batch_has_its_own_controls")
MIXED = "test_a_flat_distribution_keeps_its_nucleus_in_a_batch_with_a_steep_one"
TIES = proof(SAMPLING, "test_temperature_zero_takes_the_first_of_tied_tokens")
EDGE = proof(SAMPLING, "test_a_nucleus_ends_where_its_sum_is_reached")
PREFIXES = walked("penalties, long block"), walked("minimum length")


@fault("controls see the committed prefix only", f"{STATE}prefix", *PREFIXES)
def _(prefix, state, first, width):
    whole = prefix(state, first, width)
    return Prefix(whole.token_BS, torch.tensor(state.lengths)[:, None].expand(-1, width), whole.prompt_B)


@chosen
def under(controls, call, transform, logit_BWV, prefix):
    """The controls are `controls(those of the run, the pass's width)`."""
    other = controls(transform.controls, logit_BWV.shape[1])
    if other != transform.controls:
        sampling = replace(SamplingConfig(), **vars(other))
        transform = SamplingTransform(sampling, transform.end_ids, transform.vocab)
    return call(transform, logit_BWV, prefix)


@fault("filters on the draft's side only", CONTROLS, walked("every control"))
@under
def _(controls, width):
    """A pass of one position is a draft's; a greedy distribution has nothing to filter."""
    bare = Controls(temperature=controls.temperature)
    return controls if width == 1 or controls.temperature == 0 else bare


fault("a bias lifts a ban", CONTROLS, proof(SAMPLING, "test_a_bias_does_not_lift_a_ban", 0.7))(
    under(lambda own, _: replace(own, bad_tokens=[i for i in own.bad_tokens if i not in own.logit_bias]))
)


@fault("controls of rows are merged", "speculative.sampling:SamplingTransform.assign", BY_ROW)
def _(assign, transform, row, controls):
    own = controls.controls != transform.controls
    assign(transform, row, vars(transform).setdefault("first", controls) if own else controls)


@fault("a few tokens are a nucleus if one row's are", FILTERS, proof(SAMPLING, MIXED, (0, 1)))
def _(filtered, probs, top_k, top_p, min_p):
    few = probs.topk(min(FEW[0], probs.shape[-1])).values
    enough = bool((few.sum(-1) >= top_p).any())
    return filtered(probs.where(probs >= few[..., -1:], 0) if enough else probs, top_k, top_p, min_p)


fault("a nucleus has one token more than its sum needs", FILTERS, EDGE)(
    lambda filtered, probs, top_k, top_p, min_p: filtered(probs, top_k, top_p + 1e-6, min_p)
)
fault("temperature 0 as a small number", CONTROLS, walked("greedy"))(
    under(lambda controls, _: replace(controls, temperature=controls.temperature or 0.3))
)
fault("greedy takes the last of tied tokens", CONTROLS, TIES)(
    lambda call, transform, logit_BWV, prefix: call(transform, logit_BWV.flip(-1), prefix).flip(-1)
)
fault("rows of a batch are not put back in order", CONTROLS, BY_ROW)(lambda call, *of: call(*of).roll(1, 0))

# Random numbers, by what a draw is called (`Slot`), or by the words of Philox's counter.

UNIFORMS, CLOCKS = "speculative.rng:CounterDraws.uniforms", "speculative.rng:CounterDraws.clocks"
PHILOX, NUMBERS = "speculative.rng:np", "proofs.test_draws"
TWO_USES = proof(NUMBERS, "test_no_number_has_two_uses")
TWICE = proof(NUMBERS, "test_a_run_asks_for_no_number_twice", "block")
TEXTS = proof(NUMBERS, "test_texts_have_the_targets_distribution", "block")
ONE_LENGTH = proof(NUMBERS, "test_prompts_of_one_length_have_numbers_of_their_own")
STRICT = proof(NUMBERS, "test_a_uniform_that_equals_the_chance_does_not_pass", 0, 0.0)

fault("one random number for accept and correct", f"{STATE}slot", PLAIN)(
    lambda slot, state, _, offset=0: slot(state, Purpose.ACCEPT, offset)
)
fault("draws not keyed by length", f"{STATE}slot", PLAIN)(
    lambda slot, state, *of: replace(slot(state, *of), bases=tuple(state.prompt_lengths))
)


@fault("one row's correction for all rows", "speculative.engine:decide", walked("two ragged rows"))
def _(decide, rule, draws, *given):
    token = draws.categorical
    same = SimpleNamespace(
        bernoulli=draws.bernoulli, categorical=lambda probs_BV: token(probs_BV[:1].expand_as(probs_BV))
    )
    return decide(rule, same, *given)


fault("accepts at u = ratio = 0", "speculative.rng:RoundNumbers.bernoulli", STRICT)(
    lambda coins, draws, chance: coins(draws, chance.nextafter(torch.ones_like(chance)))
)


@chosen
def named(change, numbers, draws, slot, *given):
    """A draw has the numbers of another one: `change(draws, slot)` says what differs."""
    return numbers(draws, replace(slot, **change(draws, slot)), *given)


fault("drafts and coins have the coins' numbers", UNIFORMS, TWO_USES, TEXTS)(
    named(lambda _, slot: {"purpose": Purpose.ACCEPT})
)
fault("clocks kept over rounds", CLOCKS, TWICE)(named(lambda _, slot: {"bases": (0,) * len(slot.bases)}))
fault("prompts of one length share their numbers", f"{UNIFORMS} {CLOCKS}", ONE_LENGTH)(
    named(lambda draws, slot: {"keys": vars(draws).setdefault("first", {}).setdefault(slot.bases, slot.keys)})
)
fault("a coin is its draft's number", UNIFORMS, TWO_USES, TWICE, TEXTS)(
    named(lambda draws, slot: {"purpose": Purpose.DRAFT})
)
fault("a coin is the next draft's number", UNIFORMS, TWO_USES)(
    named(lambda _, slot: {"purpose": Purpose.DRAFT, "offset": slot.offset + slot.purpose})  # 1 of coins
)


@chosen
def numbered(numbers, numpy):
    """numpy, whose Philox gives `numbers(raw, key, stream, base, count)`, made of `raw(count, counter)`."""

    def philox(key, counter):
        def raw(count, counter=counter):
            return numpy.random.Philox(key=key, counter=counter).random_raw(count)

        return SimpleNamespace(random_raw=lambda count: numbers(raw, int(key[1]), *counter[2:], count))

    return SimpleNamespace(**{**vars(numpy), "random": SimpleNamespace(Philox=philox)})


def counted(words):
    """Numbers begin at the counter `words(stream, base, how many numbers)`."""
    return numbered(lambda raw, _, stream, base, count: raw(count, words(stream, base, count)))


fault("races read the counters of drafts and coins", PHILOX, TWO_USES, TEXTS)(
    counted(lambda stream, base, _: [0, 0, ROUNDS if stream == RACES else stream, base])
)
fault("numbers do not know their length", PHILOX, TWICE)(counted(lambda stream, base, _: [0, 0, stream, 0]))
fault("the stream is added to the length", PHILOX, TWO_USES)(
    counted(lambda stream, base, _: [0, 0, 0, base + stream])
)
fault("lengths count in the lowest word", PHILOX, TWO_USES)(
    counted(lambda stream, base, _: [base, 0, stream, 0])
)
fault("a wider table has other numbers", PHILOX, TWO_USES)(
    counted(lambda stream, base, count: [0, count, stream, base])
)

# Weights in codes.

CODED, HALF = "models.formats.coded:Coded.", Cut(COLUMNS, ((64, 130),))
DECODED = proof(
    "test_coded_linear", "test_a_matrix_is_decoded_a_weight_at_a_time", "uint4", 32, torch.float32
)
PART = proof("test_coded_linear", "test_a_part_has_the_weights_of_the_whole", "uint4", 128, HALF)
GGUF = proof("test_gguf", "test_any_bytes_are_decoded_as_the_library_does", "Q4_K")


@fault("codes: the zero is subtracted after the scale", f"{CODED}decoded", DECODED)
def _(decoded, matrix, *given):
    if matrix.zero_NG is not None:
        shift_NG = matrix.zero_NG.to(matrix.scale_NG.dtype)
        matrix = replace(matrix, zero_NG=None, shift_NG=shift_NG)
    return decoded(matrix, *given)


@fault("codes: a part that begins inside a group has groups of its own", f"{CODED}cut", PART)
def _(cut, matrix, how):
    part = cut(matrix, how)
    if how is None or how.dim == 0 or not matrix.kind.group:
        return part
    first, group = how.spans[0][0] // matrix.kind.group, matrix.kind.group
    names = [name for name in ("scale_NG", "zero_NG", "shift_NG") if getattr(matrix, name) is not None]
    parts = {name: getattr(matrix, name)[:, first : first + -(-part.inputs // group)] for name in names}
    return replace(part, kind=matrix.kind, **parts)


@fault("GGUF: a block's last scales lose their upper bits", "models.formats.gguf_source:coded", GGUF)
def _(coded, kind, byte_NBS):
    changed = byte_NBS.clone()
    changed[..., 4:8] &= 63  # the upper bits of these bytes belong to the last scales
    return coded(kind, changed)
