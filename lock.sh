#!/usr/bin/env bash
# Writes requirements*.lock: what machine-install.sh installs, with the hashes of all files of a version.
#
#   ./lock.sh           the newest versions that pyproject.toml allows (make lock)
#   ./lock.sh --keep    the versions of the locks, where pyproject.toml allows them: after a change of it
#
# uv, which resolves for all systems and Pythons at once, comes from the package index and goes at the end.
# UV_DEFAULT_INDEX names another index. Without one, hashes are those of the public index.
set -euo pipefail
cd "$(dirname "$0")"

UV=0.13.9
BUILD=requirements-build.lock
RUN=requirements.lock
CUDA=requirements-cuda.lock
DEV=requirements-dev.lock
newest=--upgrade
case "${1-}" in
    "") ;;
    --keep) newest=--no-upgrade ;;
    *) printf 'error: unknown flag %s; allowed --keep\n' "$1" >&2; exit 2 ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -q --disable-pip-version-check "uv==$UV"
sed -nE 's/^TORCH=(.*)/torch==\1/p' machine-install.sh >"$work/torch"

# An existing lock is where versions are kept from. No path and no index of this machine is written.
resolve() {
    "$work/venv/bin/uv" pip compile -q --universal --fork-strategy fewest --python-version 3.11 \
        --no-header --no-emit-index-url --no-annotate "$newest" "$@"
}
names() { sed -nE 's/^([A-Za-z0-9._-]+)==.*/\1/p' "$1"; }
leave_out() { sed 's/^/--no-emit-package=/'; }

# Writes a lock with a head; takes its name and the arguments of resolve. Head: standard input.
lock() {
    local name=$1
    shift
    cp "$name" "$work/new" 2>/dev/null || : >"$work/new"
    resolve --generate-hashes -o "$work/new" "$@" >/dev/null
    # At the end uv lists what was left out: the head says it.
    { cat; sed '/^# The following packages were excluded/,$d' "$work/new"; } >"$name.part"
    mv "$name.part" "$name"
}

printf '%s\n' pip setuptools editables "hatchling>=1.26" >"$work/build.in"
lock "$BUILD" "$work/build.in" <<'END'
# By `make lock`. What builds packages that come as source, and this one; pip itself. It is installed first.
END

# A build of torch has files of its own: so do CUDA's libraries and triton, which it brings.
resolve -c "$work/torch" --extra plots pyproject.toml -o "$work/all" >/dev/null
names "$work/all" | grep -E '^(torch|triton|cuda-.*|nvidia-.*)$' | leave_out >"$work/torch.out"
# shellcheck disable=SC2046  # a flag a word
lock "$RUN" $(cat "$work/torch.out") -c "$work/torch" -c "$BUILD" --extra plots pyproject.toml <<'END'
# By `make lock`. What runs the program, without torch. pip takes a file only if it has one of these hashes.
# Not here: torch, whose builds (CPU, a CUDA or ROCm version) have files, so hashes, of their own; machine-install.sh
# names its version. What the build for CUDA 13.0 brings is in requirements-cuda.lock.
END

# shellcheck disable=SC2046
lock "$CUDA" --no-emit-package=torch $( { names "$RUN"; names "$BUILD"; } | leave_out) \
    -c "$RUN" -c "$BUILD" "$work/torch" <<'END'
# By `make lock`. What torch's build for CUDA 13.0 brings, which is the public index's: CUDA's libraries and triton.
# Builds for other versions of CUDA and for ROCm bring others, which no lock has: torch alone says which.
END

# shellcheck disable=SC2046
lock "$DEV" $(grep -v '=triton$' "$work/torch.out") $( { names "$RUN"; names "$BUILD"; } | leave_out) \
    -c "$work/torch" -c "$RUN" -c "$BUILD" -c "$CUDA" --extra plots --extra dev pyproject.toml <<'END'
# By `make lock`. What tests and lint need besides: machine-install.sh --dev, make test, CI.
END
