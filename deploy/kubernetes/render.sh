#!/bin/bash
# Makes cluster.yaml and servicemonitor.yaml, for `kubectl apply`, out of the Helm chart:
# `deploy/kubernetes/render.sh`, or with a folder to put them into.
set -euo pipefail
folder=$(realpath "${1:-$(dirname "${BASH_SOURCE[0]}")}")
cd "$(dirname "${BASH_SOURCE[0]}")"

render() {
    printf '# Made of the chart by deploy/kubernetes/render.sh.\n'
    helm template bagua-autotune ../helm/bagua-autotune --set secret.existing=bagua-autotune "$@" \
        | sed '/^# Source: /d; s/ *$//'
}

render > "$folder/cluster.yaml"
render --set serviceMonitor.enabled=true --show-only templates/servicemonitor.yaml \
    > "$folder/servicemonitor.yaml"
