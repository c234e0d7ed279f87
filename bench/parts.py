"""A round over its parts, of a pair of models with states, and of a Gemma 4 with its assistant.

    python bench/parts.py [ks=4] [rows=1,8] [turns=15] [threads=2] [write=FILE.md]
    python bench/parts.py small=true       # little models: its code alone

Each pair runs eagerly and with compiled steps; an assistant runs eagerly in both. Parts are K steps of the
draft and one of the target, alone, in turn with the round (contenders.py). What the round takes besides is
probabilities, draws, the decision, and the host's work for them. Weights are random, bf16: 12 layers of width
1024, of which 9 keep states, with 4 of width 256, of which 3 do; 12 layers of width 1024, of which 2 see the
whole text, with an assistant of 4 layers of width 256.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import LENGTH, VOCAB, opened, rounds, sizes  # noqa: E402
from surroundings import report  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config import Dtype, ModelConf, RunConf, SpeculationConfig, Steps  # noqa: E402
from llama_ssp.models.checkpoint import complete  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from tests.heads import save_assistant  # noqa: E402

AGREEMENT = 0.89
ENGINES = (Steps.eager, Steps.compiled)


@dataclass
class Asked(Words):
    """The command line."""

    ks: str = "4"
    rows: str = "1,8"
    turns: int = 15
    threads: int = 2
    small: bool = False
    write: str = ""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two models, and the folders of those that are not made from a seed."""

    name: str
    target: ModelConf
    draft: ModelConf
    folders: tuple[Path | None, Path | None] = (None, None)

    def opened(self, engine: Steps, rows: int, slots: int, k: int) -> PairSession:
        spec = SpeculationConfig(k=k, adaptive=False)
        run = RunConf(model=self.target, draft=self.draft, engine=engine, speculation=spec)
        return opened(run, slots, rows=rows, folders=self.folders)


def with_states(small: bool) -> Pair:
    """A Qwen3.5 and a smaller one, of which three layers of four keep states."""
    target, draft = sizes(AGREEMENT, small)
    return Pair(name="states", target=hybrid(target, heads=8), draft=hybrid(draft, heads=4))


def hybrid(model: ModelConf, heads: int) -> ModelConf:
    """The model with states in place of keys and values, in three layers of four."""
    layers = 4 if model.n_layers < 12 else 12
    return replace(
        model,
        name=f"{layers}x{model.dim}, states",
        family="qwen3_5_text",
        dtype=Dtype.bf16,
        n_layers=layers,
        n_kv_heads=max(1, model.n_heads // 4),
        linear_layers=3 * layers // 4,
        linear_key_heads=heads // 2,
        linear_value_heads=heads,
        linear_key_dim=64,
        linear_value_dim=64,
        linear_kernel=4,
    )


def assisted(folder: Path, small: bool) -> Pair:
    """A Gemma 4 of random weights, and its assistant, as folders."""
    from transformers import AutoModelForCausalLM, Gemma4TextConfig

    layers, dim = (3, 128) if small else (12, 1024)
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(
        vocab_size=VOCAB, hidden_size=dim, intermediate_size=3 * dim, num_hidden_layers=layers,
        num_attention_heads=dim // 64, num_key_value_heads=dim // 128, head_dim=64, global_head_dim=128,
        num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, sliding_window=512, final_logit_softcapping=30.0,
        layer_types=[kinds[layer % 6 == 5 or layer == layers - 1] for layer in range(layers)],
        max_position_embeddings=4608, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "target")
    own: dict[str, Any] = {
        "hidden_size": dim // 4, "intermediate_size": dim, "num_attention_heads": dim // 128,
        "num_hidden_layers": 4, "num_kv_shared_layers": 4, "layer_types": [*kinds[:1] * 3, kinds[1]],
    }  # fmt: skip
    save_assistant(folder / "assistant", config, dtype=torch.bfloat16, loud=1.0, **own)
    places = folder / "target", folder / "assistant"
    target, draft = (
        complete(ModelConf(name=place.name, path=str(place), dtype=Dtype.bf16), role)[0]
        for place, role in zip(places, ("model", "draft"), strict=True)
    )
    return Pair(name="assistant", target=target, draft=draft, folders=places)


def lines(pair: Pair, asked: Asked) -> Iterator[list[str]]:
    """Gives a row of the table for each engine, number of rows and K."""
    ks = [int(k) for k in asked.ks.split(",")]
    slots = LENGTH + 2 * asked.turns + 3 * max(ks) + 2
    for engine in ENGINES:
        for rows in map(int, asked.rows.split(",")):
            session = pair.opened(engine, rows, slots, max(ks))
            for k, draft, target, round_, over in rounds(session, ks, turns=asked.turns, rows=rows)[1:]:
                rest = float(round_) - int(k) * float(draft) - float(target)
                yield [
                    pair.name, engine.value, str(rows), k, draft, target, round_, f"{rest:.2f}", over
                ]  # fmt: skip
            session.close()


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(asked.threads)
    table = [["pair", "steps", "rows", "K", "draft step, ms", "target step, ms", "round, ms", "the rest, ms",
              "round over its parts"]]  # fmt: skip
    with TemporaryDirectory() as folder:
        for pair in (with_states(asked.small), assisted(Path(folder), asked.small)):
            table += lines(pair, asked)
    report(
        asked.write, "A round over its parts: states, and an assistant", {"model": "cpu", "draft": "cpu"},
        f"Medians of {asked.turns} turns, in which parts and round take turns; texts of {LENGTH} tokens;",
        f"temperature 1, vocabulary {VOCAB}, {asked.threads} threads. The rest is the round less its parts.",
        "", "```", *aligned(table, 0), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
