"""Tokens to text while they are generated: no half characters, no half stop strings, no special tokens."""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
Stop = str | int  # a text, or a special token's id

CONTEXT_TOKENS = 8  # of the prompt, decoded with the text: a token's text may depend on its neighbours
CHARACTER_TOKENS = 4  # the most tokens of one character
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns a growing list of tokens into growing text.

    A byte-level token may end within a character: its text then ends in a replacement character, which is
    held back until the next tokens show whether it stays one, or the text ends. Decoding always begins with
    a whole character: from half a character on, some tokenizers return nothing for a run of byte tokens.
    """

    def __init__(self, decode: Decode, before: list[int]) -> None:
        self._decode = decode
        self._tokens = _tail(decode, before)
        self._read = len(self._tokens)
        self._early = 0  # characters of the tokens after `_read` that were returned already

    def push(self, token: int) -> str:
        """Returns the text that this token completes."""
        self._tokens.append(token)
        known = self._decode(self._tokens[: self._read])
        grown = self._decode(self._tokens)
        if not grown.startswith(known):
            known = known.rstrip(INCOMPLETE)  # of a prompt that ends within a character
        new = grown[len(known) :]
        whole = new.rstrip(INCOMPLETE)
        piece = whole[self._early :]
        self._early = max(self._early, len(whole))
        if new and whole == new:
            self._tokens = self._tokens[self._read :]
            self._read = len(self._tokens)
            self._early = 0
        return piece

    def end(self) -> str:
        """Returns the rest of a text that ends here: replacement characters that were held back."""
        rest = self._decode(self._tokens[self._read :])
        return rest[len(rest.rstrip(INCOMPLETE)) :]


def _tail(decode: Decode, tokens: list[int]) -> list[int]:
    """Returns the last few tokens, from a whole character on."""
    tails = [tokens[-CONTEXT_TOKENS - more :] for more in range(CHARACTER_TOKENS)]
    return next((tail for tail in tails if not decode(tail).startswith(INCOMPLETE)), tails[0])


class TextSoFar:
    """The text of one row: where a stop ends it, and what may be printed."""

    def __init__(self, decode: Decode, prompt: Sequence[int], stops: Sequence[Stop]) -> None:
        self._detokenizer = Detokenizer(decode, list(prompt))
        self._stops = [stop for stop in stops if isinstance(stop, str)]
        self._stop_ids = {stop for stop in stops if isinstance(stop, int)}
        self._longest = max(map(len, self._stops), default=0)
        self._taken = 0
        self.text = ""  # without a stop string that ended it

    def kept(self, tokens: list[int], last: bool = False) -> int | None:
        """Adds the next tokens, or the last; returns how many are kept if a stop ends inside them."""
        for count, token in enumerate(tokens, start=1):
            if self.push(token):
                return count
        return len(tokens) if last and self.end() else None

    def push(self, token: int) -> bool:
        """Adds a token; returns whether a stop is complete."""
        if token in self._stop_ids:
            self.end()
            return True
        return self._add(self._detokenizer.push(token))

    def end(self) -> bool:
        """Adds what was held back; returns whether a stop is complete."""
        return self._add(self._detokenizer.end())

    def _add(self, piece: str) -> bool:
        old = len(self.text)
        self.text += piece
        since = max(0, old - self._longest + 1)
        places = [at for stop in self._stops if (at := self.text.find(stop, since)) >= 0]
        if places:
            self.text = self.text[: min(places)]
        return bool(places)

    def printable(self, ended: bool) -> str:
        """Returns the text to print now: a possible beginning of a stop string is held back."""
        safe = len(self.text)
        if not ended:  # the longest tail that a stop string begins with is held back
            sizes = range(min(self._longest - 1, safe), 0, -1)
            stops = self._stops
            safe -= next((n for n in sizes if any(stop.startswith(self.text[-n:]) for stop in stops)), 0)
        piece = self.text[self._taken : safe]
        self._taken = max(self._taken, safe)
        return piece
