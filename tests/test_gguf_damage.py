"""Damaged and hostile GGUF files: each ends in one line, exit 4, with little time and memory."""

import os
import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from transformers.integrations.gguf import gguf_tokenizer_mapping

from llama_ssp.config import ModelConf
from llama_ssp.errors import MODEL, ModelError
from llama_ssp.models.assemble import wanted
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.loader import differences, opened, require_complete
from llama_ssp.models.model_config import require_supported
from llama_ssp.text.tokenizer import read_tokens
from llama_ssp.text.vocabulary import end_ids_of
from tests.gguf_files import gguf
from tests.test_gguf import made
from tests.test_gguf_tokenizer import add_that_of_folders

TOKENS, MATRIX, NORM = "tokenizer.ggml.tokens", "blk.0.attn_q.weight", "blk.0.attn_norm.weight"
HUGE = [2**32, 2**62, 2**63, 2**64 - 1]
NOT_A_SIZE = [0, 1, 10**6, 2**31, 2**32 - 1]
PEAK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Sound:
    """A file without damage, and where its parts lie."""

    raw: bytes
    header: int  # its bytes, up to the tensors

    def place(self, what: str, name: str) -> int:
        """Returns the first byte of a part of the header, or of the key or tensor with this name."""
        if not name:
            return {"magic": 0, "version": 4, "tensors": 8, "keys": 16}[what]
        start = self.raw.index(struct.pack("<Q", len(name)) + name.encode())
        after = start + 8 + len(name)  # the kind of a key, the number of a tensor's dimensions
        shape = after + 4
        type_ = shape + 8 * self.raw[after]
        places = {
            "length": start, "kind": after, "value": shape, "count": after + 8, "text": after + 16,
            "dims": after, "shape": shape, "type": type_, "place": type_ + 4,
        }  # fmt: skip
        return places[what]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    path, _ = made("llama", tmp_path_factory.mktemp("sound"), metadata=add_that_of_folders)
    assert complete(ModelConf(name="x", path=str(path)), "model")[0].n_layers == 2
    return Sound(path.read_bytes(), gguf.GGUFReader(path).data_offset)


# What is overwritten, of which key or tensor, with numbers of which kind.
NUMBERS: list[tuple[str, str, str, list[float]]] = [
    ("magic", "", "I", [0, 0x4C4D4747, 0x66756767, 0x04034B50]),
    ("version", "", "I", [0, 1, 4, 99, 3 << 24, 2**32 - 1]),
    ("tensors", "", "Q", [0, 20, 22, 10**5, *HUGE]),
    ("keys", "", "Q", [0, 12, 40, 10**5, *HUGE]),
    ("length", "llama.block_count", "Q", [0, 1, *HUGE]),
    ("length", MATRIX, "Q", [0, 1, *HUGE]),
    ("kind", "llama.block_count", "I", [8, 9, 13, 77, 2**32 - 1]),
    ("value", "general.architecture", "Q", [0, 1, 6, *HUGE]),
    ("value", TOKENS, "I", [0, 6, 9, 13, 2**32 - 1]),
    ("count", TOKENS, "Q", [0, 1, 10**5, *HUGE]),
    ("text", TOKENS, "Q", [10**5, *HUGE]),
    ("dims", MATRIX, "I", [0, 1, 3, 5, 64, 2**31, 2**32 - 1]),
    ("shape", MATRIX, "Q", [0, 1, 255, 512, *HUGE]),
    ("type", MATRIX, "I", [0, 4, 16, 20, 24, 39, 77, 2**32 - 1]),
    ("type", NORM, "I", [2, 12, 24, 28]),
    ("place", MATRIX, "Q", [0, 1, 2**20 + 8, 2**40, 2**62, 2**63, 2**64 - 32, 2**64 - 1]),
    ("value", "llama.embedding_length", "I", NOT_A_SIZE),
    ("value", "llama.attention.head_count", "I", NOT_A_SIZE),
    ("value", "llama.attention.head_count_kv", "I", NOT_A_SIZE),
    ("value", "llama.attention.key_length", "I", NOT_A_SIZE),
    ("value", "llama.feed_forward_length", "I", NOT_A_SIZE),
    ("value", "llama.block_count", "I", NOT_A_SIZE),
    ("value", "llama.context_length", "I", [0, 2**31]),
    ("value", "llama.rope.freq_base", "f", [0.0, -1.0, float("nan"), float("inf")]),
    ("value", "llama.attention.layer_norm_rms_epsilon", "f", [0.0, float("nan")]),
    ("value", "tokenizer.ggml.eos_token_id", "I", [300, 10**6, 2**32 - 1]),
]  # fmt: skip
CASES = [(*where, letter, value) for *where, letter, values in NUMBERS for value in values]
CUT_SHORT = [0, 1, 4, 23, 24, 100, 1000, 5000, -100_000, -1000, -33]


def written(folder: Path, raw: bytes | bytearray) -> Path:
    """A file by another name each time: headers are kept by name and time."""
    path = folder / f"{len(list(folder.iterdir()))}.gguf"
    path.write_bytes(raw)
    return path


def changed(sound: Sound, what: str, name: str, letter: str, value: float) -> bytes:
    place, new = sound.place(what, name), struct.pack(f"<{letter}", value)
    raw = sound.raw[:place] + new + sound.raw[place + len(new) :]
    assert raw != sound.raw
    return raw


@pytest.fixture
def bounded() -> Iterator[None]:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < PEAK_BYTES


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        complete(ModelConf(name="x", path=str(path)), "model")
        end_ids_of(path)  # before memory is planned
    assert error.value.code == MODEL and len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_number_that_lies(sound: Sound, case: tuple[str, str, str, float], tmp_path: Path) -> None:
    assert str(tmp_path) in refused(written(tmp_path, changed(sound, *case)))


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("size", CUT_SHORT)
def test_a_file_cut_short(sound: Sound, size: int, tmp_path: Path) -> None:
    assert "cannot be read" in refused(written(tmp_path, sound.raw[:size]))


@pytest.mark.usefixtures("bounded")
def test_a_list_without_end_in_a_file_that_is_a_hole(sound: Sound, tmp_path: Path) -> None:
    """Each text of it is empty, so that millions of them lie in the file."""
    raw = changed(sound, "count", TOKENS, "Q", 2**22)[: sound.place("text", TOKENS)]
    path = written(tmp_path, raw)
    os.truncate(path, 2**36)
    assert f"a list of {2**22} texts" in refused(path)


def test_two_tensors_of_one_name(sound: Sound, tmp_path: Path) -> None:
    raw = sound.raw.replace(MATRIX.encode(), MATRIX.replace("q", "k").encode())
    assert "duplicated tensor" in refused(written(tmp_path, raw))


@pytest.mark.few(4)
@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("seed", range(8))
def test_flipped_bytes(sound: Sound, seed: int, tmp_path: Path) -> None:
    """A byte is refused, or is one that no reader needs."""
    random = Random(seed)
    for _ in range(25):
        place = random.randrange(sound.header)
        raw = bytearray(sound.raw)
        raw[place] ^= 1 << random.randrange(8)
        path = written(tmp_path, raw)
        try:
            complete(ModelConf(name="x", path=str(path)), "model")
            read_tokens(path, 300)
            config = require_supported(path)
            source = opened(path, config, names := wanted(config))
            require_complete(path, differences(names, source.shapes, config))
        except ModelError as error:
            assert len(str(error).splitlines()) == 1


def test_a_library_that_makes_no_tokenizer(
    sound: Sound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17, which pip may keep: it is told by its version, not by what it lacks."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))  # no tokenizer of an earlier start
    monkeypatch.delattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", raising=False)
    (tmp_path / "models").mkdir()
    path = written(tmp_path / "models", sound.raw)
    told = r"found transformers 5\.\d.*, allowed 5\.18 or later; update"
    with pytest.raises(ModelError, match=told) as error:
        read_tokens(path, 300)
    assert len(str(error.value).splitlines()) == 1 and "tokenizer.json" in str(error.value)


def test_what_the_message_says(sound: Sound, tmp_path: Path) -> None:
    """The file's names of tensors, and no advice for another mistake."""
    raw = changed(sound, "value", "llama.attention.key_length", "I", 10**6)
    said = refused(written(tmp_path, raw))
    assert "contradicts the header's sizes" in said
    assert "blk.0.attn_k.weight; found (128, 256), allowed (4000000, 256)" in said
    raw = changed(sound, "value", "tokenizer.ggml.eos_token_id", "I", 300)
    assert "'eos': 300" in refused(written(tmp_path, raw))
    said = refused(written(tmp_path, changed(sound, "version", "", "I", 99)))
    assert "version 99" in said and "update gguf" in said
