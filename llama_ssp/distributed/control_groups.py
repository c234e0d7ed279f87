"""Control groups (cgroups, versions 1 and 2): by them a container or a job limits this process. No torch."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS_TABLE = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def folders_of(controller: str) -> Iterator[tuple[int, Path]]:
    """Yields the groups of this process that may limit what the controller shares out, the innermost first.

    Each comes as the version of its files and the folder that has them, which need not be there: a container
    may show its own group as the root.
    """
    with suppress(OSError):
        for line in GROUPS_TABLE.read_text(encoding="utf-8").splitlines():
            _, controllers, place = line.split(":", 2)
            if not controllers:  # the one line of version 2, for all controllers
                version = 2
                root = GROUPS
            elif controller in controllers.split(","):
                version = 1
                root = GROUPS / controller
            else:
                continue

            place = place.strip("/")
            for name in (place, *map(str, Path(place).parents)):
                yield version, root / name
