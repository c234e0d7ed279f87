"""Programs: functions that torch has compiled, and their files for the next start."""

import itertools
import logging
import re
import shlex
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llama_ssp.models import kept_files
from llama_ssp.models.kept_files import compiler, is_ours, part_of, place_of, processor, source_text
from llama_ssp.models.kv_cache import growing

log = logging.getLogger(__name__)

Program = Callable[..., Any]
ONE_PROGRAM = threading.RLock()
NUMBERS = itertools.count()  # of the programs that this process compiles
OPTIONS: dict[str, Any] = {
    "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
    "size_asserts": False,
    "cpp.threads": 1,  # what is between two linear layers is too little to be divided
    "shape_padding": False,  # on a GPU each step would copy a weight whose sizes are no multiples of 8
}
OPTIONS_BY_DEVICE: dict[str, dict[str, Any]] = {
    "cpu": {"realize_reads_threshold": 1},  # a sum that two kernels read is kept: fewer kinds to compile
    "cuda": {"pattern_matcher": False},  # else a product and a sum become one, which copies first: slower
}
# Whether torch's headers are compiled before the first program. It takes 8 s of a core once and 1 s in each
# process; then a kernel takes 0.8 s instead of 2.9. A start compiles few kernels; tests compile hundreds.
HEADERS_FIRST = False


@dataclass(frozen=True)
class ProgramSpec:
    """What a program is made of: `function(module, *arguments)`, and in words what else it depends on."""

    function: Program
    module: nn.Module
    arguments: tuple[Any, ...]
    kinds: tuple[str, ...]  # of the blocks


def sizes(module: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]


def compiled(spec: ProgramSpec) -> Any:
    """The program; `save_compiled_function` writes it.

    torch keeps programs by code, and no guards are checked that would tell decoders apart: each has code of
    its own. torch also keeps, by place in the source, which sizes and numbers differed from an earlier
    decoder's, and would take those for variables, unguarded: `dynamic=False` keeps it to the marked ones.
    """
    name = f"step_{next(NUMBERS)}"
    code = spec.function.__code__.replace(co_name=name, co_qualname=name)
    function = types.FunctionType(code, spec.function.__globals__, name)
    options = OPTIONS | OPTIONS_BY_DEVICE[spec.arguments[0].device.type]
    mark(spec.arguments)
    # Compiling ahead is off in torch 2.11. Programs have no guards, which Python 3.13.0 makes slow.
    settings = torch._dynamo.config.patch(enable_aot_compile=True, issue_3_13_0_warning=False)
    with quick_builds(), settings:
        program: Any = torch.compile(function, fullgraph=True, dynamic=False, options=options)
        program = program.aot_compile(((spec.module, *spec.arguments), {}))
    program.disable_guard_check()
    return program


@contextmanager
def quick_builds() -> Iterator[None]:
    """Torch builds no programs but kernels, of one program at a time: it may not trace in two threads.

    Else it would try out in each process which vectors the processor has, as /proc/cpuinfo says anyway, and
    compile headers first.
    """
    import torch._inductor.config as inductor  # a second; eager runs do without
    import torch._inductor.cpp_builder as builder

    settings: dict[str, Any] = {
        "cpp.vec_isa_ok": True,
        "cpp_cache_precompile_headers": HEADERS_FIRST,
        "cpp.cxx": (None, compiler()),  # torch itself looks for g++ alone
    }
    with ONE_PROGRAM, inductor.patch(settings):
        run = builder.run_compile_cmd
        builder.run_compile_cmd = partial(compile_beside, run)
        try:
            yield
        finally:
            builder.run_compile_cmd = run


def compile_beside(run: Callable[[str, str], None], command: str, cwd: str) -> None:
    """Runs a compiler for torch; its file takes its place when it is whole.

    To torch any file in a kernel's place is one: half a file, of a killed compiler, crashes all later starts.
    """
    words = shlex.split(_with_blanks_kept(command))
    at = words.index("-o") + 1
    place = Path(words[at])
    part = part_of(place)
    words[at] = str(part)
    run(shlex.join(words), cwd)
    part.replace(place)


def _with_blanks_kept(command: str) -> str:
    """Escapes blanks in the two folders whose paths torch writes into a compiler's command as they are.

    These are torch's own, where its libraries are, and the cache, where sources and kernels are. Some paths
    in them are quoted already, depending on torch's version.
    """
    for folder in (str(Path(torch.__file__).parent), str(kept_files.cache_folder().parent)):
        escaped = re.sub(r"(\s)", r"\\\1", folder)
        around = re.split(rf"(?<!['\"]){re.escape(folder)}", command)
        command = escaped.join(around)
    return command


def mark(arguments: tuple[Any, ...]) -> None:
    """Marks the sizes that may differ in the next call: of tokens, a cache's slots, the rows of a tuple."""
    for argument in arguments:
        sizes_that_grow = [(argument, 0, "T")]
        if isinstance(argument, list):
            sizes_that_grow = [each for layer in argument for each in growing(layer)]
        elif isinstance(argument, tuple):
            sizes_that_grow = [(tensor, 0, "R") for tensor in argument]
        elif isinstance(argument, dict):
            sizes_that_grow = [(tensor, 0, "T") for part in argument.values() for tensor in part]
        for tensor, dim, size in sizes_that_grow:
            torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=size)


def load_or_compile(model: Any, spec: ProgramSpec, loaded: dict[Path, Program]) -> Program:
    """Returns the program: from `loaded`, or from disk, or compiled, and then kept for the next start."""
    path = program_path(model, spec)
    program = loaded.get(path) or load(path)
    if program is None:
        log.info("engine: compiling a part of %s", model.name)
        program = compiled(spec)
        save(program, path)
    loaded[path] = program
    return program


def program_path(model: Any, spec: ProgramSpec) -> Path:
    """Names a program of a decoder or a head by a hash of all that it is made from, except weights."""
    on_cpu = model.device.type == "cpu"
    # A GPU's program is for any host with such a GPU: machines with others may share a home.
    # A CPU's program is for any number of threads: its own code runs on one, operators ask when they run.
    host = processor() if on_cpu else torch.cuda.get_device_name(model.device)
    return place_of(
        "step",
        torch.__version__,
        version("transformers"),
        host,
        model.config,
        spec.module,
        sizes(spec.module),
        spec.kinds,
        spec.function.__name__,
        model.device,
        model.ranks.label,
        OPTIONS_BY_DEVICE[model.device.type],  # a benchmark compares some
        source_text(),
        suffix=".bin",
    )


def load(path: Path) -> Program | None:
    """Returns the program, ready to be called; None if there is none that works.

    What is in the file is run: only this user may be able to write it and its folder.
    """
    try:
        if not is_ours(path):
            return None
        with path.open("rb") as file, quick_builds():
            program: Any = torch.compiler.load_compiled_function(file)
        program.disable_guard_check()
    except Exception as error:  # whatever torch raises for a file that is not whole
        log.debug("engine: %s: %s: %s", path, type(error).__name__, error)
        return None
    loaded: Program = program
    return loaded


def save(program: Any, path: Path) -> None:
    """Writes the program; if that fails, the next start compiles again."""
    part = part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        program.save_compiled_function(str(part))
        part.chmod(0o600)
        part.replace(path)
        kept_files.drop_unused()
    except Exception as error:  # whatever torch finds in a module that it cannot write
        part.unlink(missing_ok=True)
        log.debug("engine: %s is not kept: %s", path, error)
