#!/bin/bash
# Builds the sdist and, from it, the wheel; checks both, and that the wheel works in an environment
# of its own: `deploy/build_distributions.sh [FOLDER [TAG]]`. A TAG such as v0.2.0 must be that of
# the version. Needs Python 3.11 or newer with venv, and PyPI.
set -euo pipefail
folder=$(realpath -m "${1:-dist}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=$(python3 -c 'import tomllib
print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
if [ "${2:-v$version}" != "v$version" ]; then
    echo "the tag is $2, but pyproject.toml has version $version" >&2
    exit 1
fi
if [ -n "$(ls -A "$folder" 2> /dev/null)" ]; then
    echo "$folder is not empty: what is in it would be published, too" >&2
    exit 1
fi

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools/build"
"$tools/build/bin/pip" install --quiet build==1.6.1 twine==7.0.0
"$tools/build/bin/python" -m build --outdir "$folder" .
"$tools/build/bin/twine" check --strict "$folder"/*

# The service alone: without torch, which only a training needs, as in the image.
python3 -m venv "$tools/try"
python3 - > "$tools/service.txt" << 'END'
import tomllib

extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*extras["service"], sep="\n")
END
"$tools/try/bin/pip" install --quiet --requirement "$tools/service.txt" --constraint constraints.txt
"$tools/try/bin/pip" install --quiet --no-deps "$folder"/*.whl
cd "$tools" # not where the packages lie as sources
"$tools/try/bin/bagua-autotune" --version
