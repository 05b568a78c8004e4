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
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$lock" || exit 1
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --editable . || exit 1
    echo "$wanted" >"$stamp"
fi
export PATH="$PWD/$venv/bin:$PATH" KERAS_BACKEND=jax
