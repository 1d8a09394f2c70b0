#!/bin/bash
# Makes the manifests below, for `kubectl apply`, from the Helm chart:
# `deploy/kubernetes/render.sh`, or with a folder to write them to.
set -euo pipefail
folder=$(realpath "${1:-$(dirname "${BASH_SOURCE[0]}")}")
cd "$(dirname "${BASH_SOURCE[0]}")"

render() {
    printf '# Made from the Helm chart by deploy/kubernetes/render.sh.\n'
    helm template bagua-autotune ../helm/bagua-autotune --set secret.existing=bagua-autotune "$@" \
        | sed '/^# Source: /d; s/ *$//'
}

# One optional resource of the chart: its template, and what is set.
render_one() {
    local template=$1
    shift
    render --show-only "templates/$template.yaml" "$@" > "$folder/$template.yaml"
}

render > "$folder/cluster.yaml"
render_one servicemonitor --set serviceMonitor.enabled=true
render_one prometheusrule --set prometheusRule.enabled=true
render_one cronjob --set prune.enabled=true
render_one ingress --set ingress.enabled=true
