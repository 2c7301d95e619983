#!/usr/bin/env bash
# Makes a virtual environment with vLLM's CPU package for the tests of marker `vllm`.
# Usage: tests/vllm/install.sh DIRECTORY        then: PRL_VLLM_PYTHON=DIRECTORY/bin/python pytest -m vllm tests/vllm
# Needs Python 3.11 and a CPU build of torch 2.13.0 where pip finds it (PIP_FIND_LINKS or an index that has it).
# Does nothing when the environment is complete already.
set -euo pipefail
target=$1
wanted=$(dirname "$(realpath "$0")")/requirements.txt
python=${PYTHON:-python3.11}
if cmp -s "$wanted" "$target/requirements.txt" && "$target/bin/python" -c pass; then exit 0; fi
rm -rf "$target"
"$python" -m venv "$target"
"$target/bin/python" -m pip install --quiet uv
links=()
for place in ${PIP_FIND_LINKS:-}; do links+=(--find-links "$place"); done
"$target/bin/uv" pip install --quiet --python "$target/bin/python" --no-deps "${links[@]}" -r "$wanted"
cp "$wanted" "$target/requirements.txt"
