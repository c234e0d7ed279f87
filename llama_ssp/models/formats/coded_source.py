"""Reads quantised checkpoints: each matrix from its codes and scales, everything else as it is."""

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from llama_ssp.errors import ModelError
from llama_ssp.models.folder import REFETCH
from llama_ssp.models.formats.block_layouts import STATE, FourBit, Mxfp4Experts
from llama_ssp.models.formats.coded import Coded
from llama_ssp.models.formats.layouts import Awq, Gptq, Matrix, PackQuantized, Scaled, Stored
from llama_ssp.models.formats.quantised_config import PLAIN, QuantisedConfig
from llama_ssp.models.safetensors_io import FileSource, model_name
from llama_ssp.models.sharding import Cut

INT8_UNIT = 7.874015718698502e-3  # of LLM.int8: 1/127, as bitsandbytes rounds it
# Tensors that stand with a matrix's codes, by the end of their names; the longer end counts.
PARTS = [
    ".weight",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
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
# Scales of caches and of activations, which are not quantised here.
UNUSED: tuple[str, ...] = (
    ".input_scale",
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
SCALES = "F32", "F16", "BF16", "U8", "F8_E8M0"  # the last two are exponents
TYPES: dict[str, tuple[str, ...]] = {
    ".weight_scale": SCALES,
    ".weight_scale_inv": SCALES,
    ".scales": SCALES[:3],
    ".SCB": SCALES[:1],
    ".weight.absmax": ("F32", "U8"),
    ".g_idx": ("I32", "I64"),
    ".weight_shape": ("I32", "I64"),
}
STACKED = ("_blocks", "_scales")


class CodedSource(FileSource):
    """The weights of a quantised folder."""

    def __init__(self, folder: Path, known: Collection[str], prefix: str, config: QuantisedConfig) -> None:
        """`known` and `prefix`: as of a FileSource; `config`: of the folder's config.json."""
        super().__init__(folder, known, prefix)
        layers: dict[str, dict[str, Stored]] = {}
        for name in [name for name in self._places if name.endswith(UNUSED)]:
            del self._places[name], self.shapes[name]
        for name, (handle, key) in self._places.items():
            end = max((part for part in PARTS if name.endswith(part)), key=len, default=None)
            if end is not None:
                layers.setdefault(name.removesuffix(end), {})[end] = Stored(handle, key)
        self._matrices: dict[str, Matrix] = {}
        for stem, stored in layers.items():
            if stored.keys() == {".weight"} and stored[".weight"].dtype in PLAIN:
                continue
            for end in stored:
                del self._places[stem + end], self.shapes[stem + end]
            name = model_name(stem if STACKED[0] in stored else f"{stem}.weight", known, prefix)
            self._matrices[name] = matrix = _matrix(stored, config)
            self.shapes[name] = tuple(matrix.shape)
            if self._is_idle(bias := f"{stem}.bias", known):
                del self._places[bias], self.shapes[bias]

    def _is_idle(self, name: str, known: Collection[str]) -> bool:
        """Whether it is zero, and not one of the model's: old GPTQ files have a bias for every layer."""
        if name in known or name not in self._places:
            return False
        handle, key = self._places[name]
        return not handle.get_tensor(key).any()

    def read(self, name: str, cut: Cut | None) -> Tensor | Coded:
        matrix = self._matrices.get(name)
        return super().read(name, cut) if matrix is None else matrix.read(cut)

    def close(self) -> None:
        self._matrices.clear()
        super().close()


def source_of(
    folder: Path, known: Collection[str], prefix: str, config: QuantisedConfig | None
) -> FileSource:
    return FileSource(folder, known, prefix) if config is None else CodedSource(folder, known, prefix, config)


def _matrix(stored: dict[str, Stored], config: QuantisedConfig) -> Matrix:
    """Returns the matrix of these tensors. Raises ModelError if some are missing, or contradict each other."""
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
    """A ModelError if codes are there twice, or a tensor holds numbers of a type that it cannot have."""
    twice = [end for end in (".weight", ".qweight", ".weight_packed") if end in stored]
    if len(twice) > 1:
        raise stored[twice[0]].wrong("the number", " and ".join(twice), "one of them")
    for end, tensor in stored.items():
        if tensor.dtype not in (allowed := TYPES.get(end, (tensor.dtype,))):
            raise tensor.wrong("the type", tensor.dtype, ", ".join(allowed))


def _layout(stored: dict[str, Stored], config: QuantisedConfig) -> Matrix:
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
        case "bitsandbytes" if ".SCB" in stored:
            order = stored.get(".weight_format")
            if order is not None and order.read().any():
                raise order.wrong("the order of codes", order.read().tolist(), "0, row after row")
            return Scaled(stored, ".SCB", None, wide=True, unit=INT8_UNIT)
        case "bitsandbytes":
            return FourBit(stored, "nf4" if f"{STATE}nf4" in stored else "fp4")
        case _ if ".weight_packed" in stored:
            matrix = PackQuantized(stored)
            if not any(bits == matrix.bits and group in (0, matrix.group) for bits, group in config.every):
                found = f"{matrix.bits} bits in groups of {matrix.group}"
                allowed = config.name
                raise stored[".weight_packed"].wrong("the format", found, f"{allowed}, as in config.json")
            return matrix
    return Scaled(stored, ".weight_scale", config.block, wide=False)
