# Sourced by the scripts beside it: sets $root, $venv, $python and defines `environment EXTRA...`.
# The environment is ${SHMKV_VENV:-.venv of this checkout}. A stamp for each extra remembers the set-up it was
# installed from, so that a second run starts at once and a changed setup.cfg or constraints.txt installs again.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SHMKV_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
python=$venv/bin/python
constraints=$root/tools/constraints.txt
stamps=$venv/.shmkv

say() { printf 'shmkv: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 1
}

base_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python >= 3.10 with the venv module was found; install one (python3, python3-venv) or name it in PYTHON="
}

pip_install() {
    # `cd` so that `.` needs no quoting rules of pip's; the checkout's path may hold spaces.
    (cd -- "$root" && "$python" -m pip install -qq --disable-pip-version-check -c "$constraints" "$@") >&2
}

fingerprint() {
    printf '%s\n' "$root" | cat - "$root/setup.cfg" "$root/pyproject.toml" "$constraints" | sha256sum
}

is_stamped() { [[ -f $stamps/$1 && $(<"$stamps/$1") == "$fingerprint" ]]; }

stamp() { printf '%s\n' "$fingerprint" >"$stamps/$1"; }

environment() {
    local base extra lock missing=()
    fingerprint=$(fingerprint)
    mkdir -p -- "$(dirname -- "$venv")"
    exec {lock}>"$venv.lock"
    flock --nonblock "$lock" || {
        say "waiting for another set-up of $venv"
        flock "$lock"
    }
    if [[ ! -d $stamps ]]; then
        base=$(base_python) || exit 1
        say "making $venv with $("$base" --version)"
        "$base" -m venv "$venv" || die "could not make $venv"
        mkdir -p -- "$stamps"
    fi
    for extra in "$@"; do is_stamped "$extra" || missing+=("$extra"); done
    if ((${#missing[@]})); then
        extras=$(IFS=,; printf '%s' "${missing[*]}")
        say "installing shmkv[$extras] into $venv (the first time takes a minute or more)"
        pip_install -e ".[$extras]" || die "pip could not install shmkv[$extras]; its message is above"
        for extra in "${missing[@]}"; do stamp "$extra"; done
    fi
    if declare -F also_install >/dev/null; then also_install; fi
    exec {lock}>&-
}
