#!/bin/bash
# Writes into Dockerfile and compose.yaml which digest each image's tag has in its registry today,
# so that a build tomorrow takes the same image: `deploy/pin_images.sh`. With --check it writes
# nothing, and ends with 1 if a digest is not that of the tag. Needs skopeo and the registries.
#
# SKOPEO_OPTIONS: further options of `skopeo inspect`.
set -euo pipefail
cd "${ROOT:-$(dirname "${BASH_SOURCE[0]}")/..}"
files=(Dockerfile compose.yaml)
status=0

read -ra options <<< "${SKOPEO_OPTIONS:-}"
pattern='[a-z0-9][a-z0-9./:_-]*@sha256:[0-9a-f]{64}'
mapfile -t references < <(grep -ohE "$pattern" "${files[@]}" | sort -u)
for pinned in "${references[@]}"; do
    image=${pinned%@*}
    # A digest is the hash of the manifest; for several platforms, of the list of manifests.
    hash=$(skopeo inspect "${options[@]}" --raw "docker://$image" | sha256sum)
    digest=sha256:${hash%% *}
    if [ "$pinned" = "$image@$digest" ]; then
        echo "$image: as pinned"
    elif [ "${1:-}" = --check ]; then
        echo "$image: now $digest, pinned ${pinned#*@}"
        status=1
    else
        sed -i "s|$pinned|$image@$digest|g" "${files[@]}"
        echo "$image: pinned at $digest"
    fi
done
exit "$status"
