{{- define "autotune.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "autotune.labels" -}}
app.kubernetes.io/name: bagua-autotune
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "autotune.secret" -}}
{{- if .Values.secret.existing -}}
{{- .Values.secret.existing -}}
{{- else if .Values.secret.token -}}
{{- include "autotune.name" . -}}
{{- else -}}
{{- fail "the service listens on a network, so it needs a token: set secret.existing to the name of a Secret with the key token, or secret.token" -}}
{{- end -}}
{{- end -}}

{{/* Not empty: SQLite's file is on a volume that stays. */}}
{{- define "autotune.isPersistent" -}}
{{- if and .Values.persistence.enabled (not .Values.secret.database) -}}
{{- if gt (int .Values.replicas) 1 -}}
{{- fail "several replicas share a PostgreSQL database: set secret.database, or put its URL into secret.existing as the key database and set persistence.enabled to false" -}}
{{- end -}}
true
{{- end -}}
{{- end -}}
