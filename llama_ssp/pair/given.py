"""What a script gives a pair in place of files and names: a drafter of its own."""

from dataclasses import dataclass

from llama_ssp.speculative.drafters.own import MakeDrafter


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """What a script gives; nothing, by default."""

    make_drafter: MakeDrafter | None = None


NOTHING = Given()
