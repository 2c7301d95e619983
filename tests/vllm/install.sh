#!/usr/bin/env bash
# Makes a virtual environment with vLLM's CPU package for the tests of marker `vllm`.
# Usage: tests/vllm/install.sh DIRECTORY        then: PRL_VLLM_PYTHON=DIRECTORY/bin/python pytest -m vllm tests/vllm
# Needs Python 3.11 (PYTHON names another interpreter) and a CPU build of torch 2.13.0 where pip finds it.
# Does nothing when the environment is complete already; tries a second time when a download fails.
set -euo pipefail
target=$1
wanted=$(dirname "$(realpath "$0")")/requirements.txt
python=${PYTHON:-python3.11}
if cmp -s "$wanted" "$target/requirements.txt" && "$target/bin/python" -c pass; then exit 0; fi

install() {
    rm -rf "$target"
    "$python" -m venv "$target" &&
        # The file names everything that is needed. Bytecode of what is used is written when it is first imported.
        "$target/bin/python" -m pip install -qq --no-input --no-deps --no-compile -r "$wanted" &&
        env -u PYTHONDONTWRITEBYTECODE "$target/bin/python" -c 'import torch, transformers, vllm'
}

install || { echo "$0: second attempt in 10 s" >&2; sleep 10; install; }
cp "$wanted" "$target/requirements.txt"
