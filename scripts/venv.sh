# Sourced by the other scripts: makes .venv from the lock file where that is not done yet, and puts it first in PATH.
# $venv, $lock and $size name another one.
: "${venv:=.venv}" "${lock:=requirements.lock}" "${size:=1.1 GB}"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "Python 3.11 or newer is needed; set PYTHON to its path." >&2
    return 1
}

stamp="$venv/installed"
wanted=$(cat "$lock" pyproject.toml | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    python=$(find_python) || exit 1
    echo "Making $venv and installing what $lock names (once; about $size) …"
    "$python" -m venv "$venv" || exit 1
    with_pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
    # uv takes a tenth of pip's time, but reads few of pip's settings, such as those of a mirror: where it fails, pip does the same.
    with_uv() { UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" "$venv/bin/uv" pip install --quiet --python "$venv" "$@"; }
    with_pip uv==0.13.9 && with_uv -r "$lock" && with_uv --no-deps --editable . ||
        { with_pip -r "$lock" && with_pip --no-deps --editable .; } || exit 1
    echo "$wanted" >"$stamp"
fi
# uv leaves it to the first import to compile a module, and tests start hundreds of interpreters: what was compiled is kept.
export PATH="$PWD/$venv/bin:$PATH" KERAS_BACKEND=jax PYTHONDONTWRITEBYTECODE=
