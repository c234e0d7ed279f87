"""Who else can change a folder from which code is loaded. No torch.

What is in such a folder is run as this user: kernels (.so, .cubin), generated Python, pickled programs. So
nobody but this user and root may be able to put a file there, to change one, or to exchange a folder on the
way to it. `fault_on_the_way` looks along a path, `fault_inside` also at all that the folder holds.
"""

import functools
import grp
import os
import pwd
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

ROOT = 0
GROUP_BITS = 0o070
OTHERS_BITS = 0o007
# Bits of the group and of all others, in one.
WRITE = 0o022
SEARCH = 0o011
MAX_LINKS = 40  # symbolic links on one way: Linux follows no more
ACL = "system.posix_acl_access"


@dataclass(frozen=True)
class Fault:
    """Why what is at `path` may be another user's; `fix` is what the owner of the files can do."""

    path: Path
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path} {self.why}"


@dataclass(frozen=True)
class Way:
    """Where a path leads.

    `hidden` says that a folder on the way lets nobody else in (no x for group and others), so that modes
    below it do not matter.
    """

    place: Path
    hidden: bool


def fault_on_the_way(path: Path) -> Fault | None:
    """Returns why others can exchange what is at the path, or write it; None if they cannot.

    Raises FileNotFoundError if there is nothing, and other errors of the system.
    """
    way = _follow(path)
    return way if isinstance(way, Fault) else None


def fault_inside(folder: Path) -> Fault | None:
    """Returns why others can change the folder, or something that it holds; None if they cannot.

    It reads the entries of every folder below, and no contents: a few microseconds a file. It says how things
    are now: where nobody else may write, nobody else can change that later. Raises FileNotFoundError and
    other errors of the system, as `fault_on_the_way` does.
    """
    owners = _owners()
    to_look_at = [folder]  # paths whose whole way is looked at: the folder, and links below it
    seen = set[Path]()
    while to_look_at:
        way = _follow(to_look_at.pop())
        if isinstance(way, Fault):
            return way
        if way.place in seen or not way.place.is_dir():
            continue

        to_list = [(str(way.place), way.hidden)]  # folders below, whose ways are known already
        while to_list:
            name, hidden = to_list.pop()
            seen.add(Path(name))
            entries = _entries(name)
            if entries is None:
                return Fault(
                    path=Path(name),
                    why="cannot be listed, so nobody knows who may write what it holds",
                    fix="delete it, or make it readable (chmod u+r, or chown)",
                )
            for entry in entries:
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # another process writes here, too
                    continue

                if facts.st_uid not in owners:
                    return _of_stranger(Path(entry.path), facts)
                if entry.is_symlink():
                    if os.path.exists(entry.path):  # else nothing can be loaded by it
                        to_look_at.append(Path(entry.path))
                    continue
                # The first test is cheap, and most often enough; `_bits` may read groups and ACLs.
                if not hidden and facts.st_mode & WRITE and _bits(entry.path, facts) & WRITE:
                    return _writable(Path(entry.path), facts)
                if entry.is_dir(follow_symlinks=False):
                    to_list.append((entry.path, hidden or _lets_nobody_in(entry.path, facts)))
    return None


def _entries(folder: str) -> list[os.DirEntry[str]] | None:
    """Returns what a folder holds; None if this process may open files there by name, but not list them.

    The folder is root's or this user's: another owner was refused before.
    """
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:  # another process has removed it
        return []
    except PermissionError:
        may_enter = os.access(folder, os.X_OK)
        return None if may_enter else []  # nothing can be loaded from a folder that cannot be entered


def _follow(path: Path) -> Way | Fault:
    """Goes along a path, links included, as the kernel does, and looks at every folder and link on it."""
    # The folders from / to here, and whether each is hidden.
    folders: list[tuple[Path, bool]] = []
    to_go = list(reversed(path.absolute().parts))  # a stack: the next part is at its end
    links = 0
    while to_go:
        name = to_go.pop()
        if name == "..":
            if len(folders) > 1:  # the parent of / is /
                folders.pop()
            continue
        entry = folders[-1][0] / name if folders else Path(name)
        hidden = folders[-1][1] if folders else False
        facts = entry.lstat()

        is_last = not to_go
        allowed = _owners() if is_last else _owners_of_parents()
        if facts.st_uid not in allowed:
            return _of_stranger(entry, facts)
        if stat.S_ISLNK(facts.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(f"too many links: {path}")
            target = Path(os.readlink(entry))
            if target.is_absolute():
                folders.clear()
            to_go += reversed(target.parts)
            continue

        # In a sticky folder such as /tmp others may make files, and remove only their own: they cannot
        # exchange the next folder. The last one they could still fill.
        is_shared = bool(facts.st_mode & stat.S_ISVTX) and not is_last
        if not hidden and not is_shared and _bits(entry, facts) & WRITE:
            return _writable(entry, facts)
        folders.append((entry, hidden or _lets_nobody_in(entry, facts)))

    # `..`, or a link to `.`, ends at a folder that was only passed above, where less is asked of it.
    place, hidden = folders[-1]
    is_below_hidden = len(folders) > 1 and folders[-2][1]
    facts = place.lstat()
    if facts.st_uid not in _owners():
        return _of_stranger(place, facts)
    if not is_below_hidden and _bits(place, facts) & WRITE:
        return _writable(place, facts)
    return Way(place=place, hidden=hidden)


def _lets_nobody_in(path: Path | str, facts: os.stat_result) -> bool:
    return stat.S_ISDIR(facts.st_mode) and not _bits(path, facts) & SEARCH


def _bits(path: Path | str, facts: os.stat_result) -> int:
    """Returns what users other than the owner may do: the group's and the others' bits of the mode.

    The bits of a group in which the owner is alone do not count: with a umask of 002, systems give each user
    such a group.
    """
    bits = facts.st_mode & (GROUP_BITS | OTHERS_BITS)
    if bits & GROUP_BITS and _is_owners_alone(facts.st_gid, facts.st_uid) and not _has_acl(path):
        bits &= OTHERS_BITS
    return bits


@functools.cache
def _is_owners_alone(group: int, owner: int) -> bool:
    """Returns whether the group was made with the user, has the user's name, and has no other member."""
    try:
        user = pwd.getpwuid(owner)
        entry = grp.getgrgid(group)
    except KeyError:  # a number without a name
        return False
    if user.pw_gid != group or user.pw_name != entry.gr_name:
        return False

    # The group's own list leaves out users whose primary group it is (useradd -g).
    members = {*entry.gr_mem, *(other.pw_name for other in pwd.getpwall() if other.pw_gid == group)}
    return members <= {user.pw_name}


def _has_acl(path: Path | str) -> bool:
    """Returns whether an access control list names further users or groups.

    The group's bits of the mode are then the most that any of these may do.
    """
    try:
        return bool(os.getxattr(path, ACL))
    except (OSError, AttributeError):  # none, or no such thing here
        return False


def _owners() -> frozenset[int]:
    return frozenset({ROOT, os.geteuid()})


@functools.cache
def _owners_of_parents() -> frozenset[int]:
    """Returns who may own a folder on the way: this user, and root by whatever number it is seen.

    In a user namespace that does not know the machine's root (Apptainer, rootless containers) root's folders
    are shown as those of the overflow uid (most often 65534, nobody). It stands for all users of the machine
    that the namespace does not know, so a folder of another of them on the way is taken, too; the place that
    the way leads to is not.
    """
    owners = {ROOT, os.geteuid()}
    try:
        map_text = Path("/proc/self/uid_map").read_text(encoding="ascii")
        outside = Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii")
    except OSError:  # no Linux
        return frozenset(owners)
    # A line of the map: first number inside, first number outside, how many. Root can only be the first.
    first_outside = [int(line.split()[1]) for line in map_text.splitlines()]
    if ROOT not in first_outside:
        owners.add(int(outside))
    return frozenset(owners)


def _of_stranger(path: Path, facts: os.stat_result) -> Fault:
    return Fault(
        path=path,
        why=f"belongs to {_name(facts.st_uid)} (mode {_mode(facts)})",
        fix="delete it, or if you trust all that is there make it your own (chown)",
    )


def _writable(path: Path, facts: os.stat_result) -> Fault:
    who = "everybody" if facts.st_mode & OTHERS_BITS & WRITE else "a group"
    owner = _name(facts.st_uid)
    return Fault(
        path=path,
        why=f"may be written by {who} (mode {_mode(facts)}, of {owner})",
        fix=f"chmod go-w {shlex.quote(str(path))}",
    )


def _mode(facts: os.stat_result) -> str:
    return f"{stat.S_IMODE(facts.st_mode):04o}"


def _name(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name} (uid {user})"
    except KeyError:
        return f"uid {user}"
