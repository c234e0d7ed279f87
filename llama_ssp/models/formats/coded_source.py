"""Reads quantised checkpoints: each matrix from its codes and scales, everything else as it is."""

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from llama_ssp.errors import ModelError
from llama_ssp.models.folder import REFETCH
from llama_ssp.models.formats.block_layouts import STATE, FourBit, Mxfp4Experts, Nvfp4
from llama_ssp.models.formats.coded import Coded
from llama_ssp.models.formats.layouts import Awq, Gptq, Matrix, PackQuantized, Scaled, Stored
from llama_ssp.models.formats.quantised_config import PLAIN, QuantisedConfig
from llama_ssp.models.layout import model_name
from llama_ssp.models.safetensors_io import FileSource, NameOf
from llama_ssp.models.sharding import Cut

# Of LLM.int8: 1/127, rounded as in bitsandbytes' own decoding of stored matrices. `LLM_INT8` of
# models/quantization.py has 1/127 itself.
INT8_UNIT = 7.874015718698502e-3
# Ends of the names of tensors that make a matrix together: codes, scales, zero points and others. No end is
# the end of another one.
PART_ENDS = [
    ".weight",  # codes of FP8, int8 and bitsandbytes, or a plain matrix
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    "_blocks",
    ".weight_shape",
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".SCB",
    ".weight_format",
    "_scales",
    ".weight.absmax",
    ".weight.quant_map",
    ".weight.nested_absmax",
    ".weight.nested_quant_map",
    f"{STATE}nf4",
    f"{STATE}fp4",
]
# Scales of KV caches and of activations, which are not quantised here.
UNUSED: tuple[str, ...] = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".k_zero_point",
    ".v_zero_point",
)
FLOATS = ("F32", "F16", "BF16")
EXPONENTS = ("U8", "F8_E8M0")  # of two, a byte each
# Types that a tensor may have, by the end of its name; the layouts look at the others.
TYPES: dict[str, tuple[str, ...]] = {
    ".weight_scale": (*FLOATS, *EXPONENTS),
    ".weight_scale_inv": (*FLOATS, *EXPONENTS),
    ".weight_scale_2": ("F32",),
    ".weight_global_scale": ("F32",),
    ".scales": FLOATS,
    ".SCB": ("F32",),
    ".weight.absmax": ("F32", "U8"),
    ".g_idx": ("I32", "I64"),
    ".weight_shape": ("I32", "I64"),
}
STACKED_CODES = "_blocks"  # of MXFP4: all experts of a layer in one tensor, whose name has no .weight


class CodedSource(FileSource):
    """The weights of a quantised folder: matrices in codes, and other tensors as a FileSource has them."""

    def __init__(
        self,
        folder: Path,
        known: Collection[str],
        prefix: str,
        config: QuantisedConfig,
        name_of: NameOf,
    ) -> None:
        """`known`, `prefix` and `name_of`: as of a FileSource; `config`: of the folder's config.json."""
        super().__init__(folder, known, prefix, name_of)
        self._matrices: dict[str, Matrix] = {}
        for name in [name for name in self._places if name.endswith(UNUSED)]:
            self._drop(name)

        for stem, stored in self._parts_by_stem().items():
            if stored.keys() == {".weight"} and stored[".weight"].dtype in PLAIN:
                continue  # a norm, an embedding, or a matrix that was left in numbers
            for end in stored:
                self._drop(stem + end)
            disk_name = stem if STACKED_CODES in stored else f"{stem}.weight"
            name = model_name(disk_name, known, prefix)
            matrix = _matrix(stored, config.of_layer(stem))
            self._matrices[name] = matrix
            self.shapes[name] = tuple(matrix.shape)

            bias = f"{stem}.bias"
            if self._is_idle(bias, known):
                self._drop(bias)

    def _parts_by_stem(self) -> dict[str, dict[str, Stored]]:
        """Returns the tensors of each layer by the ends of their names; the rest of the name is its stem."""
        result: dict[str, dict[str, Stored]] = {}
        for name, (handle, key) in self._places.items():
            end = next((end for end in PART_ENDS if name.endswith(end)), None)
            if end is not None:
                result.setdefault(name.removesuffix(end), {})[end] = Stored(handle, key)
        return result

    def _drop(self, name: str) -> None:
        del self._places[name], self.shapes[name]

    def _is_idle(self, bias: str, known: Collection[str]) -> bool:
        """Returns whether a bias is zero, and not one of the model's: old GPTQ files have one in every layer.

        A bias of the model's has the model's name in `_places`; another one has that of the disk.
        """
        if bias in known or bias not in self._places:
            return False
        handle, key = self._places[bias]
        return not handle.get_tensor(key).any()

    def read(self, name: str, cut: Cut | None) -> Tensor | Coded:
        """Returns the cut part (this rank's), or all; a matrix as its codes, if it can be kept in them."""
        matrix = self._matrices.get(name)
        return super().read(name, cut) if matrix is None else matrix.read(cut)

    def close(self) -> None:
        self._matrices.clear()
        super().close()


def source_of(
    folder: Path, known: Collection[str], prefix: str, config: QuantisedConfig | None, name_of: NameOf
) -> FileSource:
    """Returns the open weights of a folder, plain or quantised; see FileSource."""
    if config is None:
        return FileSource(folder, known, prefix, name_of)
    return CodedSource(folder, known, prefix, config, name_of)


def _matrix(stored: dict[str, Stored], config: QuantisedConfig) -> Matrix:
    """Returns the matrix of these tensors. Raises ModelError if some are missing, or do not fit together."""
    key = next(iter(stored.values())).key
    _require_types(stored)
    try:
        return _layout(stored, config)
    except (KeyError, ValueError, TypeError) as error:
        found = f"{', '.join(sorted(stored))} in {config.name}"
        problem = "are not complete"
        if not isinstance(error, KeyError):
            problem = "do not fit together"
            found += f"; {error}"
        raise ModelError(
            f"the tensors of a quantised matrix {problem}", where=key, found=found, fix=REFETCH
        ) from None


def _require_types(stored: dict[str, Stored]) -> None:
    """Raises ModelError if codes are there twice, or a tensor's numbers are of a type that it cannot have."""
    twice = [end for end in (".weight", ".qweight", ".weight_packed") if end in stored]
    if len(twice) > 1:
        raise stored[twice[0]].wrong("the number", " and ".join(twice), "one of them")
    of_whole = stored.keys() & {".weight_global_scale", ".weight_scale_2"}
    for end, tensor in stored.items():
        if of_whole and end == ".weight_scale":
            continue  # NVFP4 has these in FP8, which its layout requires
        if end in TYPES and tensor.dtype not in TYPES[end]:
            raise tensor.wrong("the type", tensor.dtype, ", ".join(TYPES[end]))


def _layout(stored: dict[str, Stored], config: QuantisedConfig) -> Matrix:
    """Returns the matrix by the layout of the config's method, one of METHODS. Raises KeyError and others."""
    match config.method:
        case "awq":
            return Awq(stored, config.bits, config.group)
        case "gptq":
            return Gptq(stored, config.bits, config.group, config.less_one)
        case "mxfp4":
            return Mxfp4Experts(stored)
        case "fp8":
            scale = ".weight_scale_inv" if ".weight_scale_inv" in stored else ".weight_scale"
            return Scaled(stored, scale, config.block, wide=True)
        case "bitsandbytes" if ".SCB" in stored:  # 8 bits
            order = stored.get(".weight_format")
            if order is not None and order.read().any():
                raise order.wrong("the order of codes", order.read().tolist(), "0, row after row")
            return Scaled(stored, ".SCB", None, wide=True, unit=INT8_UNIT)
        case "bitsandbytes":  # 4 bits
            return FourBit(stored, "nf4" if f"{STATE}nf4" in stored else "fp4")
        case "compressed-tensors" if ".weight_global_scale" in stored:
            return Nvfp4(stored)
        case "modelopt" if config.bits == 4:
            return Nvfp4(stored)
        case "modelopt":
            return Scaled(stored, ".weight_scale", None, wide=True)
        case "compressed-tensors" if ".weight_packed" in stored:
            matrix = PackQuantized(stored)
            # Each group of layers in config.json has its bits, and a size of groups; 0: a scale a row.
            allowed_groups = [group for bits, group in config.every if bits == matrix.bits]
            if 0 not in allowed_groups and matrix.group not in allowed_groups:
                found = f"{matrix.bits} bits in groups of {matrix.group}"
                allowed = config.name
                raise stored[".weight_packed"].wrong("the format", found, f"{allowed}, as in config.json")
            return matrix
    return Scaled(stored, ".weight_scale", config.block, wide=False)  # compressed-tensors, a byte a number
