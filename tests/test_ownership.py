"""Code is loaded only from files that no other user can change: whose, with which mode, by which way.

Folders of these tests are where anybody may look; pytest's own are hidden from others, whatever is in them.
"""

import codecs
import ctypes
import grp
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.errors import StorageError
from llama_ssp.models import kept_files, ownership
from llama_ssp.models.kept_files import INDUCTOR, TRITON, TRITON_HOME, cache_folder, is_ours
from llama_ssp.models.kernels import build
from tests.warm import ROOT

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder of this user's that all users may enter; the user's own cache is elsewhere, and private."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (INDUCTOR, TRITON, TRITON_HOME):
        monkeypatch.setenv(name, "")
    folder = Path(tempfile.mkdtemp(prefix="open-"))
    folder.chmod(0o755)
    if not all(parent.stat().st_mode & stat.S_IXOTH for parent in folder.parents):
        pytest.skip(f"others cannot reach {folder}")
    yield folder
    shutil.rmtree(folder)


def filled(folder: Path) -> Path:
    """A folder as inductor leaves it, of this user's."""
    (folder / "ab").mkdir(parents=True, mode=0o755)
    (folder / "ab" / "kernel.so").touch(mode=0o644)
    return folder


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def named(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = filled(place / "kernels")
    monkeypatch.setenv(INDUCTOR, str(folder))
    return folder


def folder_of_a_stranger(folder: Path) -> Path:
    give_away(folder)
    return folder


def folder_inside_of_a_stranger(folder: Path) -> Path:
    give_away(folder / "ab")
    return folder / "ab"


def kernel_of_a_stranger(folder: Path) -> Path:
    give_away(folder / "ab" / "kernel.so")
    return folder / "ab" / "kernel.so"


def kernel_of_a_stranger_in_a_private_folder(folder: Path) -> Path:
    """It was put there while the folder was open."""
    folder.chmod(0o700)
    return kernel_of_a_stranger(folder)


def parent_of_a_stranger(folder: Path) -> Path:
    give_away(folder.parent)
    return folder.parent


def link_of_a_stranger(folder: Path) -> Path:
    """It leads to a folder of ours today."""
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")
    give_away(folder)
    return folder


def link_to_a_kernel_of_a_stranger(folder: Path) -> Path:
    kernel, other = folder / "ab" / "kernel.so", folder.parent / "other.so"
    kernel.rename(other)
    kernel.symlink_to(other)
    give_away(other)
    return other


def link_to_an_open_folder(folder: Path, target: str = "../open") -> Path:
    (folder / "ab").rename(folder.parent / "open")
    (folder / "ab").symlink_to(target)
    (folder.parent / "open").chmod(0o777)
    return folder.parent / "open"


def link_out_of_a_private_folder(folder: Path) -> Path:
    """The folder hides what is in it, and not where its links lead."""
    folder.chmod(0o700)
    return link_to_an_open_folder(folder, target=str(folder.parent / "open"))


def open_folder(folder: Path) -> Path:
    folder.chmod(0o777)
    return folder


def open_folder_where_only_owners_delete(folder: Path) -> Path:
    """Others may still add a file whose name is known."""
    folder.chmod(0o1777)
    return folder


def open_kernel(folder: Path) -> Path:
    (folder / "ab" / "kernel.so").chmod(0o666)
    return folder / "ab" / "kernel.so"


def open_parent(folder: Path) -> Path:
    folder.parent.chmod(0o777)
    return folder.parent


def folder_of_a_group(folder: Path) -> Path:
    os.chown(folder, -1, STRANGER)
    folder.chmod(0o775)
    return folder


GIVEN_AWAY = [
    folder_of_a_stranger, folder_inside_of_a_stranger, kernel_of_a_stranger, parent_of_a_stranger,
    kernel_of_a_stranger_in_a_private_folder, link_of_a_stranger, link_to_a_kernel_of_a_stranger,
    folder_of_a_group,
]  # fmt: skip
OPEN = [
    open_folder, open_folder_where_only_owners_delete, open_kernel, open_parent, link_to_an_open_folder,
    link_out_of_a_private_folder,
]  # fmt: skip


TAMPERED = pytest.mark.parametrize(
    "tamper",
    [*(pytest.param(case, marks=as_root) for case in GIVEN_AWAY), *OPEN],
    ids=lambda case: case.__name__,
)


@TAMPERED
def test_a_folder_that_another_user_can_change_is_not_used(
    tamper: Callable[[Path], Path], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own folder is used in its place, also by torch."""
    tamper(named(place, monkeypatch))
    used = {cache_folder().parent for _ in range(2)}
    assert used == {tmp_path / "cache" / "llama-ssp" / "compiled"}

    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert {Path(cache_dir())} == used


@TAMPERED
def test_a_folder_that_another_user_can_change_is_named(
    tamper: Callable[[Path], Path], place: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """One line says which, and what to do."""
    folder = named(place, monkeypatch)
    culprit = tamper(folder)
    used = {cache_folder().parent for _ in range(2)}
    (line,) = caplog.messages
    mode = f"{stat.S_IMODE(culprit.lstat().st_mode):04o}"
    for part in (str(folder), f"{culprit} ", mode, str(*used), f"{INDUCTOR} names another"):
        assert part in line


def private_folder(folder: Path) -> Path:
    """What is inside may have any mode: a umask of 000 or 002."""
    folder.chmod(0o700)
    (folder / "ab").chmod(0o777)
    (folder / "ab" / "kernel.so").chmod(0o666)
    return folder


def folder_in_a_private_one(folder: Path) -> Path:
    folder.parent.chmod(0o700)
    return open_folder(folder)


def readable_folder(folder: Path) -> Path:
    return folder


def folder_where_only_owners_delete(folder: Path) -> Path:
    """As in /tmp."""
    folder.parent.chmod(0o1777)
    return folder


def own_link(folder: Path) -> Path:
    (folder.parent / "link").symlink_to(folder.name)
    return folder.parent / "link"


def new_folder(folder: Path) -> Path:
    return folder / "new" / "one"


FINE = [
    private_folder, folder_in_a_private_one, readable_folder, folder_where_only_owners_delete, own_link,
    new_folder,
]  # fmt: skip


@pytest.mark.parametrize("arrange", FINE, ids=lambda case: case.__name__)
def test_a_folder_that_only_this_user_can_change_is_used_as_it_is(
    arrange: Callable[[Path], Path], place: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = arrange(named(place, monkeypatch))
    monkeypatch.setenv(INDUCTOR, str(folder))
    assert cache_folder() == folder / "llama_ssp"
    assert (os.environ[INDUCTOR], caplog.messages) == (str(folder), [])


@pytest.mark.parametrize("way", ["inner/..", "inner/../.", "self", "up/.."], ids=lambda way: way)
def test_a_way_that_ends_above_is_looked_at_where_it_ends(place: Path, way: str) -> None:
    """A sticky folder that all may write is enough to pass through, and not enough to load code from."""
    shared = place / "shared"
    (shared / "inner").mkdir(parents=True)
    (shared / "self").symlink_to(".")
    (shared / "up").symlink_to("inner")
    assert ownership.fault_on_the_way(shared / way) is None, "before others may write there"
    shared.chmod(0o1777)
    fault = ownership.fault_on_the_way(shared / way)
    assert fault is not None
    assert (fault.path, "written by everybody" in fault.why) == (shared, True)
    assert ownership.fault_inside(shared / way) is not None
    assert ownership.fault_on_the_way(shared / "inner") is None, "what is passed through"


def test_a_new_folder_is_this_users_alone_whatever_the_umask(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place / "new" / "one"
    monkeypatch.setenv(INDUCTOR, str(folder))
    before = os.umask(0)
    try:
        cache_folder()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


def test_a_group_that_is_this_users_alone_is_nobody_else(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A umask of 002 goes with such groups.

    Control: a group with another member, with another user whose primary group it is, or of another name.
    """
    user = pwd.getpwuid(os.geteuid())
    guest = pwd.struct_passwd(("guest", "x", user.pw_uid + 1, user.pw_gid, "", "/", ""))
    for number, (name, members, users) in enumerate(
        [
            (user.pw_name, [], [user]),
            (user.pw_name, ["another"], [user]),
            (user.pw_name, [], [user, guest]),
            ("users", [], [user]),
        ]
    ):
        group = grp.struct_group((name, "x", user.pw_gid, members))
        monkeypatch.setattr(grp, "getgrgid", lambda _, group=group: group)
        monkeypatch.setattr(pwd, "getpwall", lambda users=users: users)
        kernel = filled(place / str(number)) / "ab" / "kernel.so"
        os.chown(kernel, -1, user.pw_gid)
        kernel.chmod(0o664)
        ownership._is_owners_alone.cache_clear()
        assert is_ours(kernel) is (number == 0), name
    ownership._is_owners_alone.cache_clear()


@pytest.mark.parametrize("may_enter", [True, False])
def test_a_folder_that_cannot_be_listed_is_refused_if_its_files_can_be_opened(
    place: Path, monkeypatch: pytest.MonkeyPatch, may_enter: bool
) -> None:
    """Such as root's with mode 0711: what is in it might be anybody's."""
    folder = filled(place / "kernels")
    scandir = os.scandir

    def refusing(name: str) -> Any:
        if name == str(folder / "ab"):
            raise PermissionError(name)
        return scandir(name)

    monkeypatch.setattr(os, "scandir", refusing)
    monkeypatch.setattr(os, "access", lambda *_: may_enter)
    fault = ownership.fault_inside(folder)
    assert (fault is not None) is may_enter
    assert fault is None or fault.path == folder / "ab"


def test_the_command_that_closes_a_folder_can_be_pasted(place: Path) -> None:
    """Its name may hold what a shell divides at."""
    folder = place / "a b;c"
    folder.mkdir()
    folder.chmod(0o777)
    fault = ownership.fault_on_the_way(folder)
    assert fault is not None
    subprocess.run(fault.fix, shell=True, check=True)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_the_users_own_folder_counts_as_any_other(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where others can change it, there is one for temporary files, which later starts find again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    place.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary := filled(place.with_name(f"{place.name}-tmp"))))
    try:
        first = cache_folder()
        monkeypatch.setenv(INDUCTOR, "")
        assert cache_folder() == first and first.parents[1] == temporary
        assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
        assert f"{place} may be written by everybody" in caplog.messages[0]
    finally:
        shutil.rmtree(temporary)


IN_A_NEW_PROCESS = """
from llama_ssp.models import kept_files
kept_files.OTHER_PLACES = ()
print(kept_files.cache_folder().parent)
"""


@as_root
def test_where_another_has_the_name_a_new_folder_is_used(place: Path) -> None:
    """The name under the folder for temporary files is known; somebody may have made it before."""
    squatted = filled(place / f"llama-ssp-{os.geteuid()}")
    give_away(squatted)
    env = {**os.environ, "TMPDIR": str(place), "XDG_CACHE_HOME": os.devnull, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS], env=env, capture_output=True, text=True, check=True
    )
    used = Path(answer.stdout.strip())
    assert used.parent == place and used != squatted and not used.exists()
    (line,) = answer.stderr.splitlines()
    assert f"{squatted} belongs to" in line and str(used) in line


NEW_USERS, DUMPABLE = 0x10000000, 4  # CLONE_NEWUSER; PR_SET_DUMPABLE, for the files in /proc/self


def enter_a_container() -> None:
    """From here on this process knows one user, and sees root's files as those of a stranger."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresuid(1000, 1000, 1000)
        libc.prctl(DUMPABLE, 1)
    user = os.getuid()
    if libc.unshare(NEW_USERS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1\n", encoding="ascii")


def seen_in_a_container(folder: Path) -> str:
    try:
        enter_a_container()
    except OSError as error:
        return f"no container: {error}"
    ownership._owners_of_parents.cache_clear()  # known since before the fork
    folder.mkdir()
    faults = [ownership.fault_inside(folder)]
    (folder / "link").symlink_to("/etc/passwd")
    faults.append(ownership.fault_inside(folder))
    return f"{Path('/').stat().st_uid}, {', '.join(map(str, faults))}"


def test_root_s_folders_that_a_container_shows_as_another_users(place: Path) -> None:
    """They may be on the way to this user's folder; a file of theirs is not loaded."""
    place.chmod(0o777 | stat.S_ISVTX)
    codecs.lookup("ascii")  # the child may not read Python's own files
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, seen_in_a_container(place / "kernels").encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, encoding="utf-8") as answers:
        answer = answers.read()
    if answer.startswith("no container"):
        pytest.skip(answer)
    assert answer.startswith(f"{STRANGER}, None, /etc/passwd belongs to")


def test_where_nothing_is_safe_one_line_says_what_to_name(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(kept_files, "OTHER_PLACES", ())
    with pytest.raises(StorageError, match=f"name one: {INDUCTOR}=FOLDER") as refused:
        cache_folder()
    assert f"{place} may be written by everybody (mode 0777" in str(refused.value)


def test_compiled_code_is_in_the_users_cache_folder_unless_another_is_named(monkeypatch, tmp_path, caplog):
    """What nobody reads is deleted there alone; where there is no such folder one line says so, once."""
    caplog.set_level("INFO")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, folder in (("", tmp_path / "llama-ssp" / "compiled"), (f"{tmp_path}/own", tmp_path / "own")):
        monkeypatch.setenv(INDUCTOR, name)
        assert cache_folder() == folder / "llama_ssp"
        (old := folder / "ab" / "old").parent.mkdir(parents=True)
        for file in (old, new := old.with_name("new")):
            file.touch()
        os.utime(old, (0, 0))
        kept_files.drop_unused()
        assert (old.exists(), new.exists(), caplog.messages) == (bool(name), True, [])
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    monkeypatch.setenv(INDUCTOR, "")
    (used,) = {cache_folder() for _ in range(2)}
    (line,) = caplog.messages
    assert used.parents[1] == Path(tempfile.gettempdir()) and "user's cache folder fails: [Errno 20]" in line


@pytest.mark.parametrize(
    ("variable", "mode", "is_kept"),
    [
        (None, 0o755, False),
        (TRITON, 0o755, True),
        (TRITON_HOME, 0o755, True),
        (TRITON, 0o777, False),
        (TRITON_HOME, 0o777, False),
    ],
    ids=["unnamed", "named", "home", "named-open", "home-open"],
)
def test_triton_keeps_its_kernels_where_nobody_else_can_change_them(
    variable: str | None, mode: int, is_kept: bool, place: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    triton = pytest.importorskip("triton")
    kernels = filled(place / ".triton" / "cache")
    kernels.chmod(mode)
    if variable is not None:
        monkeypatch.setenv(variable, str(place if variable == TRITON_HOME else kernels))
    if variable != TRITON:
        monkeypatch.delenv(TRITON)
    kept_files.use_safe_triton_folder()
    expected = kernels if is_kept else cache_folder().parent / "triton"
    assert Path(triton.knobs.cache.dir) == expected
    said = [f"{kernels} may be written by everybody" in line for line in caplog.messages]
    assert said == ([True] if mode == 0o777 else [])


class FirstKernel:
    """A driver of Triton: like the real one it is compiled, and kept, when it is first asked."""

    kept = ""

    def get_current_target(self) -> None:
        from triton.runtime.cache import get_cache_manager

        self.kept = get_cache_manager("a" * 64).put(b"code", "driver.so")


@pytest.mark.parametrize("home", [None, "/dev/null"])
def test_triton_has_a_folder_before_its_first_kernel_where_there_is_no_home(
    home: str | None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as in a container, under a number that is no user's. All ranks have the same folder."""
    triton = pytest.importorskip("triton")
    driver = FirstKernel()
    for name in ("XDG_CACHE_HOME", "HOME", TRITON):
        monkeypatch.delenv(name)
    if home is not None:
        monkeypatch.setenv("HOME", home)

    def no_user(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", no_user)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(place))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    build.triton_runs.cache_clear()
    assert build.triton_runs()
    build.triton_runs.cache_clear()
    assert Path(driver.kept).is_relative_to(place / f"llama-ssp-{os.geteuid()}" / "triton")


SOURCE = 'extern "C" int who() {{ return {}; }}\n'
US, THEM = 1, 2


@pytest.mark.compiler
@as_root
def test_a_library_that_another_user_planted_is_not_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is no secret. Control: where the files are this user's, they are what is loaded."""
    ours, theirs = place / "ours.cpp", place / "theirs.cpp"
    ours.write_text(SOURCE.format(US))
    theirs.write_text(SOURCE.format(THEM))
    monkeypatch.setenv(INDUCTOR, str(place / "first"))
    name, planted = build.library(ours).name, build.library(theirs)
    loaded = {}
    for owner in (os.geteuid(), STRANGER):
        folder = place / str(owner) / "llama_ssp"
        folder.mkdir(parents=True)
        shutil.copy(planted, folder / name)
        for path in (folder / name, folder, folder.parent):
            os.chown(path, owner, -1)
        monkeypatch.setenv(INDUCTOR, str(folder.parent))
        loaded[owner] = ctypes.CDLL(str(build.library(ours))).who()
    assert loaded == {os.geteuid(): THEM, STRANGER: US}
