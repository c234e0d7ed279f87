#!/usr/bin/env bash
# Sets a machine up: checks it, makes .venv, installs exact versions. Run it as often as you like.
#
#   ./machine-install.sh                 the build of torch for this machine: without an NVIDIA GPU the CPU's,
#                                        if pip has no index of its own (PIP_INDEX_URL, pip.conf)
#   ./machine-install.sh --dev           what tests and lint need, too
#   ./machine-install.sh --cpu           the CPU build of torch
#   ./machine-install.sh --cuda[=cu130]  the build for that CUDA version
#   ./machine-install.sh --rocm[=7.1]    the build for that ROCm version (AMD GPUs)
#   PYTHON=python3.12 ./machine-install.sh    another interpreter
# For bash 3.2, as macOS has it: so without arrays, since there an empty one is an error under set -u.
set -euo pipefail
cd "$(dirname "$0")"

TORCH=2.13.0
WHEELS=https://download.pytorch.org/whl
VENV=.venv
BUILD=requirements-build.lock
RUN=requirements.lock
CUDA=requirements-cuda.lock
DEV=requirements-dev.lock
PYTHON=${PYTHON:-python3}

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 5; }
has_nvidia() { [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null; }

system=$(uname -s)
case "$system" in
    Linux) ;;
    Darwin) say "hint: on macOS the program runs in one process; it is not tested there" ;;
    *) die "llama-ssp does not run on $system; use Linux, or on Windows WSL2, and run this there" ;;
esac

index=  # torch's, if not that of pip's settings
dev=no
# Without an NVIDIA GPU, plain pip would fetch gigabytes of CUDA on Linux x86-64.
if [ "$(uname -sm)" = "Linux x86_64" ] && ! has_nvidia; then
    index=$WHEELS/cpu
fi
asked=no
for flag in "$@"; do
    case "$flag" in
        --dev) dev=yes; continue ;;
        --cpu) index=$WHEELS/cpu ;;
        --cuda) index=$WHEELS/cu130 ;;
        --cuda=*) index=$WHEELS/${flag#--cuda=} ;;
        --rocm) index=$WHEELS/rocm7.1 ;;
        --rocm=*) index=$WHEELS/rocm${flag#--rocm=} ;;
        *) say "error: unknown flag $flag; allowed --dev, --cpu, --cuda[=cuNNN], --rocm[=N.N]"; exit 2 ;;
    esac
    asked=yes
done

check_python() {
    command -v "$PYTHON" >/dev/null || die "no $PYTHON; install Python 3.11 or later (Debian, Ubuntu: apt-get install python3 python3-venv)"
    "$PYTHON" --version >/dev/null 2>&1 ||
        die "$PYTHON does not start; name one that does: PYTHON=/usr/bin/python3.12"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$("$PYTHON" --version) is too old; install Python 3.11 or later, or set PYTHON=python3.12"
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$PYTHON lacks venv; install it (Debian, Ubuntu: apt-get install $(basename "$PYTHON")-venv)"
}

# Hints only: a machine without a working GPU still plans, tests and runs on its CPU.
check_nvidia() {
    has_nvidia || return 0
    if ! nvidia-smi >/dev/null 2>&1; then
        say "hint: an NVIDIA GPU but no working driver; install one (Ubuntu: ubuntu-drivers install), then reboot"
        return 0
    fi
    say "NVIDIA: $(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | sort | uniq -c | sed 's/^ *//' | paste -sd';')"
    say "CUDA the driver supports: $(nvidia-smi | grep -o 'CUDA Version: [0-9.]*' | head -n 1 | cut -d' ' -f3)"
    # Machines with NVSwitch (p4d, p5, DGX, HGX) answer "Error 802: system not yet initialized" without it.
    if lspci 2>/dev/null | grep -qi nvswitch && ! systemctl is-active --quiet nvidia-fabricmanager; then
        say "hint: NVSwitch without Fabric Manager (CUDA Error 802); install nvidia-fabricmanager of the driver's"
        say "      version, then: systemctl enable --now nvidia-fabricmanager"
    fi
}

check_amd() {
    [ -e /dev/kfd ] || return 0
    [ -r /dev/kfd ] || say "hint: an AMD GPU you may not use; add yourself to its groups: usermod -aG render,video $(id -un)"
    [ "$asked" = yes ] || say "hint: an AMD GPU; install with --rocm"
}

# torch's own index, unless the user has named one: that may be all that this network reaches.
has_own_index() { pip config list 2>/dev/null | grep -E "\.(index-url|no-index)=.[^'\"]" >/dev/null; }
# Asked by pip, with its proxy and certificate; what else its settings name does not answer in place of the index.
reaches() {
    PIP_EXTRA_INDEX_URL=$1 PIP_FIND_LINKS=$VENV pip index versions torch \
        --index-url "$1" --retries 0 --timeout 10 >/dev/null 2>&1
}

# Measured with torch 2.13: all of .venv, with --dev.
size_of() {
    case "$1" in
        */cpu) echo "2.4 GB" ;;
        */rocm*) echo "more than 5 GB" ;;
        *) if [ "$system" = Darwin ]; then echo "2.4 GB"; else echo "5.1 GB"; fi ;;
    esac
}
free_here() { df -Pk "$VENV" | awk 'NR == 2 {printf "%.1f GB", $4 * 1024 / 1e9}'; }

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
# Installs; takes what it is, then pip's arguments.
install() {
    local what=$1
    shift
    local quiet=-q  # in a log; on a terminal pip shows its progress
    [ ! -t 2 ] || quiet=
    pip install $quiet "$@" || die "pip could not install $what, as its lines above say; check the network, the disk" \
        "and pip's settings (pip.conf; a mirror: PIP_INDEX_URL; a proxy: HTTPS_PROXY, PIP_CERT), then run this again"
}
# A lock has all that is needed, so pip looks for nothing else; what comes as source is built by what is here.
install_lock() { install "what $1 names" --require-hashes --no-deps --no-build-isolation -r "$1"; }
installed() { "$VENV/bin/python" -c "import importlib.metadata as m; print(m.version('$1'))" 2>/dev/null || true; }

# Whether torch's build is the one whose libraries the lock has: it asks for their very versions.
is_locked_build() {
    "$VENV/bin/python" - "$CUDA" <<'END'
import re
import sys
from importlib.metadata import requires

asked = [text.partition(";")[0] for text in requires("torch") or [] if re.match("cuda|nvidia", text)]
pinned = [re.sub(r"\[.*]|\s", "", text) for text in asked if "==" in text]
lock = open(sys.argv[1], encoding="utf-8").read()
sys.exit(not pinned or any(f"\n{text}" not in lock for text in pinned))
END
}

install_torch() {
    local here=no
    case "$(installed torch)" in "$TORCH" | "$TORCH"+*) here=yes ;; esac
    if [ $here = yes ] && ! is_old; then return 0; fi

    if [ "$asked" = no ] && [ $here = yes ]; then
        index=  # a run was stopped, or a lock has changed: what else torch brings, the public index has, too
    elif [ "$asked" = no ] && [ -n "$index" ]; then
        # Better the build that this network has than none, unless another was asked for.
        if has_own_index; then
            say "torch comes from the index of pip's settings"
            index=
        elif ! reaches "$index"; then
            say "$index does not answer: torch comes from pip's index"
            index=
        fi
        [ -n "$index" ] || say "the public index has CUDA's build ($(size_of cuda)); --cpu insists on the CPU's ($(size_of /cpu))"
    fi

    if [ $here = no ]; then
        say "installing torch $TORCH${index:+ from $index}: .venv takes $(size_of "$index") on disk; $(free_here) are free"
        install "torch $TORCH" --no-deps ${index:+--index-url "$index"} "torch==$TORCH"
    fi
    if is_locked_build; then install_lock "$CUDA"; fi
    # What another build brings; here already if it is the locked one, or the CPU's.
    install "what torch $TORCH brings" ${index:+--index-url "$index"} "torch==$TORCH"
}

check_python
check_nvidia
check_amd
# A run that was stopped may have left Python without pip, which comes last.
if ! { [ -x "$VENV/bin/python" ] && [ -x "$VENV/bin/pip" ]; }; then
    { mkdir -p "$VENV" && [ -w "$VENV" ]; } 2>/dev/null ||
        die "$PWD cannot be written, so $VENV cannot be made; clone into a folder of yours"
    "$PYTHON" -m venv "$VENV" || die "$PYTHON could not make $PWD/$VENV; check the disk"
fi

# The stamps make a second run instant: what is installed is what the files say.
stamp=$(cat "$BUILD" "$RUN" "$CUDA" pyproject.toml machine-install.sh | cksum)
is_old() { [ "$(cat "$VENV/.installed" 2>/dev/null)" != "$stamp" ]; }
if is_old; then
    [ -w "$VENV" ] || die "$PWD/$VENV is not up to date, and cannot be written; run this as its owner, or clone anew"
    say "installing the locked requirements"
    install_lock "$BUILD"
    install_lock "$RUN"
fi
# After the lock: what torch needs is there already, with the lock's versions and hashes.
install_torch
if is_old; then
    install "this package" -q --no-deps --no-build-isolation -e .
    echo "$stamp" >"$VENV/.installed"
fi
if [ "$dev" = yes ] && [ "$(cat "$VENV/.installed-dev" 2>/dev/null)" != "$(cksum "$DEV")" ]; then
    say "installing what tests and lint need"
    install_lock "$DEV"
    cksum "$DEV" >"$VENV/.installed-dev"
fi
"$VENV/bin/python" -c 'import torch; print(f"torch {torch.__version__}, {torch.cuda.device_count()} GPUs, {torch.get_num_threads()} CPU threads")' >&2
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
ranks=
[ "$gpus" -lt 2 ] || ranks=" ranks=$gpus"
say "is this machine fit? one screen says it, and what to do: $VENV/bin/llama-ssp calibrate$ranks"
