#!/bin/bash
# Writes what the image installs, with the hashes of every file of each release, so that nothing
# else can be installed in its place: `deploy/pin_requirements.sh`. The versions are those of
# constraints.txt; run it when that changes, or the requirements of the service. Needs Python 3.11
# and PyPI: pip-tools goes into an environment of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(mktemp --directory)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet --disable-pip-version-check pip-tools

# From pyproject.toml: what the image builds with, or the extras that are named.
listed() {
    python3 - "$@" <<'END'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
extras = project["project"]["optional-dependencies"]
lists = [extras[name] for name in sys.argv[1:]] or [project["build-system"]["requires"]]
print(*(line for found in lists for line in found), sep="\n")
END
}

# compiled FILE, of what comes on standard input
compiled() {
    cat > "$folder/wanted.txt"
    {
        echo "# Written by deploy/pin_requirements.sh; not to be edited."
        "$folder/tools/bin/pip-compile" --quiet --generate-hashes --allow-unsafe --strip-extras \
            --no-header --no-annotate --no-emit-index-url --no-emit-trusted-host \
            --no-emit-find-links \
            --constraint constraints.txt --output-file - "$folder/wanted.txt"
    } > "$folder/found.txt"
    mv "$folder/found.txt" "$1"
}

listed service postgresql | compiled deploy/requirements.txt
listed | compiled deploy/requirements-build.txt
