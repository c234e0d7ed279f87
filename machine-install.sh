#!/usr/bin/env bash
# Sets a machine up: checks it, makes .venv, installs exact versions. Run it as often as you like.
#
#   ./machine-install.sh                 the build of torch for this machine: without an NVIDIA GPU the CPU's
#   ./machine-install.sh --dev           what tests and lint need, too
#   ./machine-install.sh --cpu           the CPU build of torch
#   ./machine-install.sh --cuda[=cu130]  the build for that CUDA version
#   ./machine-install.sh --rocm[=7.1]    the build for that ROCm version (AMD GPUs)
#   PYTHON=python3.12 ./machine-install.sh    another interpreter
set -euo pipefail
cd "$(dirname "$0")"

TORCH=2.13.0
WHEELS=https://download.pytorch.org/whl
VENV=.venv
PYTHON=${PYTHON:-python3}

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 5; }

index=()
dev=no
has_nvidia() { [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null; }
# Without an NVIDIA GPU, plain pip would fetch gigabytes of CUDA on Linux x86-64.
if [ "$(uname -sm)" = "Linux x86_64" ] && ! has_nvidia; then
    index=(--index-url "$WHEELS/cpu")
fi
asked=no
for flag in "$@"; do
    case "$flag" in
        --dev) dev=yes; continue ;;
        --cpu) index=(--index-url "$WHEELS/cpu") ;;
        --cuda) index=(--index-url "$WHEELS/cu130") ;;
        --cuda=*) index=(--index-url "$WHEELS/${flag#--cuda=}") ;;
        --rocm) index=(--index-url "$WHEELS/rocm7.1") ;;
        --rocm=*) index=(--index-url "$WHEELS/rocm${flag#--rocm=}") ;;
        *) say "error: unknown flag $flag; allowed --dev, --cpu, --cuda[=cuNNN], --rocm[=N.N]"; exit 2 ;;
    esac
    asked=yes
done

check_python() {
    command -v "$PYTHON" >/dev/null || die "no $PYTHON; install Python 3.11 or later (Debian, Ubuntu: apt-get install python3 python3-venv)"
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

check_python
check_nvidia
check_amd
# A run that was stopped may have left Python without pip, which comes last.
[ -x "$VENV/bin/python" ] && [ -x "$VENV/bin/pip" ] || "$PYTHON" -m venv "$VENV"
quiet=(-q)  # in a log; on a terminal pip shows its progress
[ ! -t 2 ] || quiet=()
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
reaches() { "$VENV/bin/python" -c "import urllib.request as u; u.urlopen('$1', timeout=10)" 2>/dev/null; }
installed() { "$VENV/bin/python" -c "import importlib.metadata as m; print(m.version('$1'))" 2>/dev/null || true; }

case "$(installed torch)" in
    "$TORCH" | "$TORCH"+*) ;;
    *)
        # A network may know the package index alone: better its build than none, unless another was asked for.
        if [ "$asked" = no ] && [ "${#index[@]}" -gt 0 ] && ! reaches "${index[1]}/torch/"; then
            say "${index[1]} does not answer: the package index has torch, too"
            index=()
        fi
        say "installing torch $TORCH ${index[*]: -1}"
        pip install "${quiet[@]}" "${index[@]}" "torch==$TORCH"
        ;;
esac
# The stamps make a second run instant: what is installed is what the files say.
stamp=$(cat requirements.lock pyproject.toml machine-install.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat "$VENV/.installed" 2>/dev/null)" != "$stamp" ]; then
    say "installing the locked requirements"
    pip install "${quiet[@]}" -r requirements.lock
    pip install -q --no-deps --no-build-isolation -e .
    echo "$stamp" >"$VENV/.installed"
fi
if [ "$dev" = yes ] && [ "$(cat "$VENV/.installed-dev" 2>/dev/null)" != "$(sha256sum requirements-dev.lock)" ]; then
    say "installing what tests and lint need"
    pip install "${quiet[@]}" -r requirements.lock -r requirements-dev.lock
    sha256sum requirements-dev.lock >"$VENV/.installed-dev"
fi
"$VENV/bin/python" -c 'import torch; print(f"torch {torch.__version__}, {torch.cuda.device_count()} GPUs, {torch.get_num_threads()} CPU threads")' >&2
