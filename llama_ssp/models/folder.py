"""Reads the files of a model folder that may be hostile or damaged. No torch.

Only whole, regular files inside the folder are opened; nothing in them is run.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError

MAX_JSON_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 10 * 2**20  # of 100 000 tensors; a shard of a large model has a hundredth of it
GGUF = ".gguf"
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
POINTER = b"version https://git-lfs"  # how a Git LFS pointer begins
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Of a weight file, for its fingerprint.
SAMPLES = 32
SAMPLE_BYTES = 512
MAX_COUNT = 100_000  # of layers or labels: libraries make a list of this length, whatever the weights are
COUNTED = re.compile("(layers?|labels?|attention_types)$")  # of a key of config.json that counts such
TEMPLATES = "additional_chat_templates"  # a folder that libraries look into
AUTO_MAP = "auto_map"
# Ends of the names that transformers gives an architecture's classes.
BUILT_IN = "config|model|forcausallm|forsequenceclassification|fortokenclassification"
CODE_KEYS = (AUTO_MAP, "trust_remote_code", "custom_generate")
CODE_KINDS = ("", "tokenizer_", "generation_", "processor_", "preprocessor_")  # of a config.json
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
READ_BY_LIBRARIES = (".json", ".jinja", ".txt", ".model", ".safetensors")
REFETCH = "fetch the model again"
COPY = "copy it into the folder"
MODEL_FOLDER = "use a Hugging Face model folder"


def is_gguf(path: Path) -> bool:
    return path.suffix == GGUF


def weights_here(path: Path) -> bool:
    """Returns whether a folder has weights, all or some of them; a GGUF file has."""
    return is_gguf(path) or any(path.glob("*.safetensors"))


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path means: the path itself, or the one in a folder without safetensors.

    Of a model in several files the first. None if there is none; a ModelError if there are several models. A
    link that is named itself is followed; others stay inside their folder.
    """
    named = is_gguf(path) and path.is_file()
    if not named and (not path.is_dir() or any((path / name).exists() for name in (SINGLE, INDEX))):
        return None
    files = [path] if named else path.glob(f"*{GGUF}")
    models = sorted({shards(file)[0] for file in files})
    if len(models) > 1:
        raise ModelError(
            "the folder holds several GGUF models",
            where=path,
            found=", ".join(file.name for file in models[:5]),
            allowed="one",
            fix=f"write the path of one: path={models[0]}",
        )
    for file in shards(models[0]) if models else []:
        if file != path:
            require_inside(file)
    return models[0] if models else None


def shards(file: Path) -> list[Path]:
    """All files of a GGUF model, the first first."""
    match = SHARD.fullmatch(file.name)
    if match is None:
        return [file]
    counted = range(1, max(1, int(match[3])) + 1)
    return [file.with_name(f"{match[1]}-{number:05}-of-{match[3]}{GGUF}") for number in counted]


def weight_files(path: Path) -> list[Path]:
    """Returns the weight files of a model; a ModelError if one is missing, elsewhere, or pickled."""
    if is_gguf(path):
        return shards(path)
    index = path / INDEX
    single = path / SINGLE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError("the index has no weight_map", where=index, fix=REFETCH)
        names = {name if isinstance(name, str) else repr(name) for name in weight_map.values()}
        return [_shard(path, name, index) for name in sorted(names)]
    if single.exists() or single.is_symlink():
        return [_shard(path, SINGLE, path)]

    pickled = sorted(p.name for p in path.iterdir() if p.suffix in PICKLED)
    if pickled:
        convert = "from_pretrained(DIR).save_pretrained(NEW_DIR, safe_serialization=True)"
        raise ModelError(
            "the weights are pickled, which can run code",
            where=path,
            found=", ".join(pickled[:5]),
            allowed="*.safetensors",
            fix=f"convert them where you trust them: AutoModelForCausalLM.{convert}",
        )
    raise ModelError(
        "the folder holds no weights",
        where=path,
        allowed=f"{SINGLE}, {INDEX} or *{GGUF}",
        fix="give the folder of a saved model",
    )


def tensors_of(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the number format and shape of each tensor; a ModelError if a file is damaged."""
    return headers(weight_files(path))


def headers(files: Iterable[Path]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns what the headers of safetensors files say of each tensor; a ModelError if a file is damaged."""
    from safetensors import SafetensorError, safe_open  # with numpy, which a plan of a preset does not need

    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        length = int.from_bytes(require_fetched(file)[:8], "little")
        try:
            if length > MAX_HEADER_BYTES:  # the library takes ten times as much, which is seconds
                raise SafetensorError(f"a header of {length} bytes")
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118, no iterator
                    part = opened.get_slice(name)
                    tensors[name] = str(part.get_dtype()), tuple(part.get_shape())
            if escape := next((name for name in tensors if not name.isprintable()), None):
                raise SafetensorError(f"a tensor by the name of {escape!r}")  # libraries would print it
        except SafetensorError as error:
            raise ModelError(
                "the weights file is damaged or cut short",
                where=file,
                found=str(error).rpartition("header: ")[2],
                fix=REFETCH,
            ) from None
    return tensors


def adapter_file(folder: Path) -> Path:
    """Returns the weights file of an adapter; a ModelError if it is missing, elsewhere, or pickled."""
    file = folder / ADAPTER_WEIGHTS
    if file.exists() or file.is_symlink():
        return _shard(folder, ADAPTER_WEIGHTS, folder)
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
    if pickled:
        raise ModelError(
            "the adapter is pickled, which can run code",
            where=folder,
            found=", ".join(pickled[:5]),
            allowed=ADAPTER_WEIGHTS,
            fix="load it where you trust it, with peft, and save it with safe_serialization=True",
        )
    raise ModelError(
        "the folder holds no adapter", where=folder, allowed=ADAPTER_WEIGHTS, fix="fetch the adapter again"
    )


def adapter_fingerprint(folder: Path) -> str:
    """Returns a hash of all bytes of an adapter, which are few."""
    digest = hashlib.sha256((folder / ADAPTER).read_bytes())
    with adapter_file(folder).open("rb") as stream:
        while part := stream.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def fingerprint(path: Path) -> str:
    """A hash of the model that takes moments whatever its size, for ranks to compare.

    All bytes of small files count, the tokenizer's among them; of weight files, names, sizes, headers, and
    some bytes at fixed places.
    """
    digest = hashlib.sha256()
    weights = weight_files(path)
    entries = path.parent.glob("tokenizer*") if is_gguf(path) else path.iterdir()
    small = [p for p in entries if p.suffix in READ_BY_LIBRARIES and p not in weights and p.is_file()]
    for file in sorted(small):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    for file in sorted(weights):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            start = stream.read(8)
            digest.update(start + stream.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES)))
            for sample in range(SAMPLES + 1):
                stream.seek(max(0, size - SAMPLE_BYTES) * sample // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder; a ModelError if there is none."""
    try:
        require_inside(file)
        require_small(file)
        require_fetched(file)
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=_constant)
    except FileNotFoundError:
        what = f"there is no {file.name}"
        fix = MODEL_FOLDER
        if (file.parent / ADAPTER).exists():
            what = f"{what}, but an adapter (LoRA)"
            fix = f"name its model, and the folder as its adapter: model=MODEL model.adapter={file.parent}"
        raise ModelError(what, where=file.parent, fix=fix) from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file.name} is not JSON", where=file.parent, found=error, fix=REFETCH) from None
    if not isinstance(content, dict):
        raise ModelError(f"{file.name} is not a JSON object", where=file.parent, fix=REFETCH)
    return content


def _constant(name: str) -> float:
    """Returns the number that is not JSON and that Python reads all the same: models have Infinity."""
    if name == "NaN":
        raise ValueError("NaN is not JSON")
    return float(name)


def require_counts(path: Path, config: dict[str, Any]) -> None:
    """Refuses a config.json with a number of layers or labels that libraries would make a huge list of."""
    parts: list[tuple[str, Any]] = list(config.items())
    while parts:
        name, value = parts.pop()
        if isinstance(value, dict):
            parts += value.items()
        elif isinstance(value, list):
            parts += [(name, item) for item in value]
        elif isinstance(value, int) and value > MAX_COUNT and COUNTED.search(name):
            raise ModelError(
                "config.json has a number of layers or labels that no model has",
                where=path,
                found=f"{name} {value}",
                allowed=f"at most {MAX_COUNT}",
                fix=REFETCH,
            )


def require_small(file: Path) -> None:
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ModelError(
            "the file is too large", where=file, found=size, allowed=f"{MAX_JSON_BYTES} bytes", fix=REFETCH
        )


def require_safe(path: Path) -> None:
    """Refuses what libraries would open and is not a whole file of the folder, and a model that runs code."""
    require_whole(path)
    _require_no_code(path)


def require_whole(path: Path) -> None:
    """Refuses what libraries would open and is not a whole file of the folder."""
    for entry in sorted([*path.iterdir(), *path.glob(f"{TEMPLATES}/*")]):
        if entry.suffix not in READ_BY_LIBRARIES:
            continue
        require_end(entry)
        if entry.exists():
            require_inside(entry, path)
            if entry.suffix != ".safetensors":  # `header` reads those that are used
                require_fetched(entry)
            if entry.match("tokenizer*.json"):
                require_small(entry)


def require_fetched(file: Path) -> bytes:
    """Returns the first bytes; refuses a folder, a pipe, a device or an LFS pointer in place of a file."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise ModelError("not a regular file", where=file, found="a folder, a pipe or a device", fix=COPY)
    with file.open("rb") as stream:
        start = stream.read(len(POINTER))
    if start == POINTER:
        raise ModelError(
            f"{file.name} is a Git LFS pointer, not the file",
            where=file,
            fix="run git lfs pull in the model's folder, or fetch the model again",
        )
    return start


def _require_no_code(path: Path) -> None:
    """Refuses a model that needs code of its own to run, or an adapter that would change its weights."""
    for kind in CODE_KINDS:
        file = path / f"{kind}config.json"
        content = read_json(file) if file.exists() else {}
        needs = [key for key in CODE_KEYS if content.get(key)]
        if kind == "" and AUTO_MAP in needs and _names_built_in(content):
            needs.remove(AUTO_MAP)  # transformers' own class runs, and the folder's code does not
        # Attention and the like that would be fetched from a hub repository, as code.
        kernels = [key for key in content if key.endswith("_implementation") and "/" in str(content[key])]
        needs += [f"{key} {content[key]}" for key in kernels]
        if needs:
            raise ModelError(
                "the model needs to run code of its own",
                where=file,
                found=", ".join(needs),
                fix="use a model of a built-in architecture,"
                f" or a copy with no {needs[0]} in its {file.name}",
            )

        listed = content.get("fast_tokenizer_files")
        names = [str(name) for name in listed] if isinstance(listed, list) else []
        outside = [name for name in names if name != Path(name).name]
        if outside:  # libraries open one of them
            raise ModelError(
                "the model names a file outside of its folder",
                where=file,
                found=", ".join(outside),
                fix="do not use this model",
            )

    if (path / ADAPTER).exists():  # libraries apply it if peft is installed
        raise ModelError(
            "there is an adapter next to the weights",
            where=path / ADAPTER,
            fix="put the adapter's files into a folder of their own, and name it: model.adapter=FOLDER",
        )


def _names_built_in(config: dict[str, Any]) -> bool:
    """Returns whether auto_map names only classes of the architecture itself, as `x.Phi3ForCausalLM` of phi3.

    Models that were published before transformers had their architecture still bring its code.
    """
    kind = str(config.get("model_type")).replace("_", "").lower()
    entries = config[AUTO_MAP]
    if not isinstance(entries, dict) or not kind:
        return False
    names: list[object] = []
    for entry in entries.values():
        names += entry if isinstance(entry, list) else [entry]
    classes = [str(name).rpartition(".")[2].lower() for name in names if name is not None]
    return all(re.fullmatch(rf"{re.escape(kind)}({BUILT_IN})", name) for name in classes)


def require_inside(file: Path, folder: Path | None = None) -> None:
    """Refuses a link out of the model's folder, by default that of the file.

    Hub copies have links to a `blobs` folder two levels up; those count as inside.
    """
    require_end(file)
    real = file.resolve()
    home = (folder or file.parent).resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (real.is_relative_to(home) or real.is_relative_to(blobs)):
        target = file.readlink() if file.is_symlink() else real  # the same on every rank: /proc/self is not
        raise ModelError("a file leaves the folder", where=file, found=target, fix=COPY)


def require_end(file: Path) -> None:
    """Refuses a link that leads back to itself, alone or through others."""
    try:
        file.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ModelError(
                "a link leads back to itself",
                where=file,
                found=f"-> {os.readlink(file)}",
                fix="put the file itself into its place",
            ) from None


def _shard(path: Path, name: str, source: Path) -> Path:
    """Returns the file that `source` names; a ModelError unless it is in the folder."""
    if name in ("", "..") or name != Path(name).name or not name.endswith(".safetensors"):
        raise ModelError(
            "a shard's name leaves the folder, or is of another kind",
            where=source,
            found=repr(name),
            allowed="NAME.safetensors",
            fix="do not use this model",
        )
    file = path / name
    require_end(file)
    if not os.path.exists(file):
        raise ModelError(
            "a shard is missing", where=f"{source}: {name}", found="no such file", fix=f"put it into {path}"
        )
    require_inside(file)
    return file
