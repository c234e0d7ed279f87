"""Tiny vocabularies, written down token by token, and translations between them."""

from llama_ssp.text.compatibility import diagnose
from llama_ssp.text.translation import Intersection
from llama_ssp.text.vocabulary import Notation, Vocabulary


def tongue(
    *tokens: str, marks: bool = False, special: tuple[str, ...] = (), ends: tuple[str, ...] = (),
    start: tuple[str, ...] = (),
) -> Vocabulary:  # fmt: skip
    """Ids in the order given. A text is cut into the longest tokens first; `marks` reads <0x61> as a byte."""
    ids = {token: i for i, token in enumerate(tokens)}
    named = frozenset(ids[token] for token in special)
    vocabulary = Vocabulary(
        ids=ids,
        special=named,
        added=named,
        ends=frozenset(ids[token] for token in ends),
        start=tuple(ids[token] for token in start),
        notation=Notation.marks if marks else Notation.plain,
        encode=lambda text: vocabulary.cut(text.encode()),
    )
    return vocabulary


PAIRS: dict[str, tuple[Vocabulary, Vocabulary]] = {
    "overlapping": (tongue("a", "b", "ab"), tongue("b", "ba", "a")),
    "draft within target": (tongue("a", "b", "ab", "ba"), tongue("b", "a")),
    "target within draft": (tongue("a", "b"), tongue("ab", "b", "ba", "a")),
    "disjoint but for bytes": (tongue("ab", "a", "bb", "b"), tongue("<0x62>", "ba", "<0x61>", marks=True)),
    "two draft tokens for one": (tongue("a", "b", "bb"), tongue("<0x61>", "b", "a", marks=True)),
    "ends of texts": (
        tongue("a", "</s>", "b", special=("</s>",), ends=("</s>",)),
        tongue("<end>", "b", "a", "<stop>", special=("<end>", "<stop>"), ends=("<end>", "<stop>")),
    ),
    "nothing shared": (tongue("a", "b"), tongue("c", "d")),
}  # fmt: skip


def bridge(name: str) -> Intersection:
    target, draft = PAIRS[name]
    found = diagnose(target, draft, (target.size, draft.size))
    return Intersection(target, draft, found.match, found.expansion)
