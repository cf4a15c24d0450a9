# Sourced by scripts/demo, scripts/test, scripts/check and scripts/bench: sets up .venv (see _bootstrap.py) and leaves
#   root         the repository
#   venv_python  the Python of its virtual environment
# Set PYTHON to choose the interpreter that .venv is made from.

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)

usable() {
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" && echo "$PYTHON"
        return
    fi
    for name in python3 python python3.13 python3.12 python3.11 python3.10; do
        if usable "$name"; then
            echo "$name"
            return
        fi
    done
}

python=$(find_python || true)
if [ -z "$python" ]; then
    if [ -n "${PYTHON:-}" ]; then
        echo "error: PYTHON=$PYTHON is not a Python >= 3.10" >&2
    elif command -v python3 >/dev/null 2>&1; then
        echo "error: LLM-42 needs Python >= 3.10, but python3 is $(python3 --version 2>&1);" \
            "install a newer one, or set PYTHON to its path" >&2
    else
        echo "error: LLM-42 needs Python >= 3.10, and no python3 was found; install it, or set PYTHON to its path" >&2
    fi
    exit 1
fi

"$python" "$root/scripts/_bootstrap.py"
venv_python=$root/.venv/bin/python
